"""The kinds of cert-manager and the Prometheus operator that the chart makes, which no cluster has by itself.

kubernetes-validate knows Kubernetes' own kinds. These schemas hold what we use of the others, by their API references,
and nothing else: a field that is misspelt is refused, and one that is new wants a look into the reference.
"""

from typing import Any, Final

import jsonschema

_TEXT: Final = {"type": "string", "minLength": 1}
_TEXTS: Final = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION: Final = {"type": "string", "pattern": r"^([0-9]+h)?([0-9]+m)?([0-9]+s)?$", "minLength": 2}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(required),
    }


_ISSUER_REF: Final = _object("name", name=_TEXT, kind=_TEXT, group=_TEXT)
_SELECTOR: Final = _object(matchLabels=_TEXTS)
_SPECS: Final = {
    # https://cert-manager.io/docs/reference/api-docs/
    ("cert-manager.io/v1", "Issuer"): {
        "oneOf": [
            _object("selfSigned", selfSigned=_object()),
            _object("ca", ca=_object("secretName", secretName=_TEXT)),
        ]
    },
    ("cert-manager.io/v1", "Certificate"): _object(
        "secretName",
        "issuerRef",
        secretName=_TEXT,
        issuerRef=_ISSUER_REF,
        isCA={"type": "boolean"},
        commonName={"type": "string", "maxLength": 64},
        dnsNames={"type": "array", "minItems": 1, "items": _TEXT},
        duration=_DURATION,
        renewBefore=_DURATION,
        usages={"type": "array", "items": {"enum": ["digital signature", "server auth"]}},
        privateKey=_object(
            algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
            size={"enum": [256, 384, 521]},
            rotationPolicy={"enum": ["Never", "Always"]},
        ),
    ),
    # https://prometheus-operator.dev/docs/api-reference/api/
    ("monitoring.coreos.com/v1", "PodMonitor"): _object(
        "selector",
        "podMetricsEndpoints",
        selector=_SELECTOR,
        namespaceSelector=_object(any={"type": "boolean"}),
        podMetricsEndpoints={
            "type": "array",
            "minItems": 1,
            "items": _object(
                "port",
                port=_TEXT,
                interval=_DURATION,
                relabelings={
                    "type": "array",
                    "items": _object(
                        sourceLabels={"type": "array", "items": {"type": "string", "pattern": "^[a-zA-Z_]+$"}},
                        action={"enum": ["keep", "drop"]},
                        regex={"type": "string"},
                    ),
                },
            ),
        },
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _object(
        "groups",
        groups={
            "type": "array",
            "items": _object(
                "name",
                "rules",
                name=_TEXT,
                rules={
                    "type": "array",
                    "minItems": 1,
                    "items": _object(
                        "alert",
                        "expr",
                        "labels",
                        "annotations",
                        alert={"type": "string", "pattern": "^Keepstep[A-Za-z]+$"},
                        expr=_TEXT,
                        labels=_object("severity", severity={"enum": ["warning", "critical"]}),
                        annotations=_object("summary", "description", summary=_TEXT, description=_TEXT),
                        **{"for": _DURATION},
                    ),
                },
            ),
        },
    ),
}


def is_custom(found: dict[str, Any]) -> bool:
    """Whether it is one of these kinds, rather than of Kubernetes' own."""
    return str(found["apiVersion"]).startswith(("cert-manager.io/", "monitoring.coreos.com/"))


def validate(found: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError, and KeyError for a kind without a schema."""
    spec = _SPECS[found["apiVersion"], found["kind"]]
    metadata = _object("name", "namespace", name=_TEXT, namespace=_TEXT, labels=_TEXTS)
    schema = _object("spec", "metadata", apiVersion=_TEXT, kind=_TEXT, metadata=metadata, spec=spec)
    jsonschema.Draft202012Validator(schema).validate(found)
