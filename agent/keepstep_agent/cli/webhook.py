"""What the Helm chart runs: `keepstep webhook`, and `keepstep certificates` for it."""

import asyncio
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from keepstep_agent.cli.formatting import errors_reported
from keepstep_agent.cli.quantities import host_and_port
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.injection.annotations import default_problems
from keepstep_agent.core.injection.spec import FailurePolicy, InjectionDefaults
from keepstep_agent.webhook.settings import CertificateSettings, WebhookSettings
from keepstep_api.names import ANNOTATION_PREFIX

_DEFAULTS: Final = InjectionDefaults(image="")
_SETTINGS: Final = WebhookSettings(certificates=Path("/certificates"), defaults=_DEFAULTS)


def _annotations(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> Mapping[str, str]:
    found = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r} is not name=value, such as endpoint-url=https://minio.example")
        found[name if name.startswith(ANNOTATION_PREFIX) else ANNOTATION_PREFIX + name] = text
    return MappingProxyType(found)


@click.command()
@click.option("--image", required=True, envvar="KEEPSTEP_IMAGE", help="Image of the injected containers.")
@click.option(
    "--image-pull-policy",
    type=click.Choice(["IfNotPresent", "Always", "Never"]),
    default="IfNotPresent",
    show_default=True,
    help="Their pull policy.",
)
@click.option("--openshift", is_flag=True, help="OpenShift's security context constraints choose a pod's user.")
@click.option(
    "--failure-policy",
    type=click.Choice([policy.value for policy in FailurePolicy]),
    default=FailurePolicy.FAIL.value,
    show_default=True,
    callback=lambda _, __, value: FailurePolicy(value),
    help="What happens to a pod that asks for the injection and cannot have it.",
)
@click.option(
    "--grace-seconds",
    type=click.IntRange(min=1),
    default=_DEFAULTS.grace_seconds,
    show_default=True,
    help="Minimum terminationGracePeriodSeconds of a pod whose annotations set none.",
)
@click.option(
    "--cpu", default=_DEFAULTS.cpu, help="CPU request and limit of the agent; by default by the pod's QoS class."
)
@click.option("--memory", default=_DEFAULTS.memory, show_default=True, help="Memory request and limit of the agent.")
@click.option(
    "--default-annotation",
    "annotations",
    multiple=True,
    callback=_annotations,
    help="Annotation, as name=value, for every pod that does not set it. Repeatable.",
)
@click.option(
    "--certificates",
    type=click.Path(file_okay=False, path_type=Path),
    default=_SETTINGS.certificates,
    show_default=True,
    help="Folder with tls.crt and tls.key; read again when they change.",
)
@click.option("--listen", default=":8443", show_default=True, callback=host_and_port, help="host:port of HTTPS.")
@click.option(
    "--http-listen", default=":8080", show_default=True, callback=host_and_port, help="host:port of probes and metrics."
)
@click.option(
    "--read-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=_SETTINGS.read_seconds,
    show_default=True,
    help="How long the webhook waits for a review to arrive.",
)
@click.option(
    "--lame-duck-seconds",
    type=click.FloatRange(min=0),
    default=_SETTINGS.lame_duck_seconds,
    show_default=True,
    help="How long the webhook still answers after SIGTERM, until it gets no more reviews.",
)
@click.option("--log-format", type=click.Choice(["json", "console"]), default="json", show_default=True)
def webhook(**options: Any) -> None:
    """Serve the admission webhook that injects Keepstep into pods.

    The Helm chart runs this command. docs/kubernetes.md describes how to install it.
    """
    with errors_reported():
        settings = _settings(options)
        # Imported here, so that the other commands do not wait for a web server to load.
        import uvloop

        from keepstep_agent.runtime.engine.logs import configure_logs
        from keepstep_agent.webhook.server import serve_webhook

        configure_logs(options["log_format"])
        uvloop.run(serve_webhook(settings))


def _settings(options: dict[str, Any]) -> WebhookSettings:
    defaults = InjectionDefaults(**_given(InjectionDefaults, options))
    if problems := default_problems(defaults):
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"no pod could be injected with these defaults: {'; '.join(problems)}",
            hint="docs/annotations.md says which annotations every pod may be given",
        )
    return WebhookSettings(**{**_given(WebhookSettings, options), "defaults": defaults})


@click.command()
@click.option("--namespace", required=True, help="The webhook's namespace.")
@click.option("--service", default="keepstep-webhook", show_default=True, help="The webhook's Service.")
@click.option("--secret", default="keepstep-webhook-certificates", show_default=True, help="The certificates' Secret.")
@click.option("--configuration", default="keepstep", show_default=True, help="The MutatingWebhookConfiguration.")
@click.option("--kubernetes-host", required=True, envvar="KUBERNETES_SERVICE_HOST", help="The API server.")
@click.option("--kubernetes-port", default=443, envvar="KUBERNETES_SERVICE_PORT", help="The API server's port.")
@click.option(
    "--service-account",
    type=click.Path(file_okay=False, path_type=Path),
    default="/var/run/secrets/kubernetes.io/serviceaccount",
    show_default=True,
    help="Folder with the service account's token and the API server's ca.crt.",
)
@click.option(
    "--wait-seconds",
    type=click.FloatRange(min=0),
    default=90,
    show_default=True,
    help="How long to try again when something is missing or goes wrong.",
)
@click.option("--log-format", type=click.Choice(["json", "console"]), default="json", show_default=True)
def certificates(log_format: str, **options: Any) -> None:
    """Make the webhook's certificate, or renew it when it is due.

    The Helm chart runs this command, at the installation and every hour. docs/design/0007 describes what it does.
    """
    with errors_reported():
        from keepstep_agent.runtime.engine.logs import configure_logs
        from keepstep_agent.webhook.certificate_job import renew_certificates

        configure_logs(log_format)
        asyncio.run(renew_certificates(CertificateSettings(**options)))


def _given(cls: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are fields of a class of settings."""
    return {field.name: options[field.name] for field in fields(cls) if field.name in options}
