"""Values that people install the chart with, each for something that it switches."""

from typing import Any, Final

MATRIX: Final[dict[str, dict[str, Any]]] = {
    "defaults": {},
    "image by digest, mirrored, with pull secrets": {
        "image": {
            "repository": "mirror.example:5000/team/keepstep",
            "digest": "sha256:" + "0123456789abcdef" * 4,
            "pullPolicy": "Always",
            "pullSecrets": [{"name": "mirror"}],
        }
    },
    "image by tag": {"image": {"tag": "main-1234abc"}},
    "cert-manager with a CA of the chart's own": {"certManager": {"enabled": True}},
    "cert-manager with somebody's issuer": {
        "certManager": {
            "enabled": True,
            "issuerRef": {"name": "company-ca", "kind": "ClusterIssuer", "group": "cert-manager.io"},
        }
    },
    "everything watched": {
        "monitoring": {
            "podMonitors": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "30s"},
            "alerts": {
                "enabled": True,
                "labels": {"release": "prometheus"},
                "recoveryPointAgeSeconds": 1800,
                "stepAgeSeconds": 900,
            },
            "dashboard": {"enabled": True, "annotations": {"grafana_folder": "Training"}},
        }
    },
    "lenient, in some namespaces alone": {
        "webhook": {
            "failurePolicy": "Ignore",
            "timeoutSeconds": 10,
            "excludedNamespaces": ["kube-public", "kube-system", "gatekeeper-system"],
            "namespaceSelector": {
                "matchLabels": {"training": "true"},
                "matchExpressions": [{"key": "tier", "operator": "In", "values": ["gpu", "cpu"]}],
            },
        }
    },
    "an own store for everybody": {
        "injection": {
            "graceSeconds": 600,
            "cpu": 2,
            "memory": "1Gi",
            "annotations": {
                "keepstep.dev/endpoint-url": "https://minio.example:9000",
                "keepstep.dev/tags": "team=research,cost=a b",
                "keepstep.dev/keep-last": "3",
            },
            "openshift": True,
        }
    },
    "placed with care": {
        "replicas": 3,
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"node-role.kubernetes.io/infra": ""},
        "tolerations": [{"key": "node-role.kubernetes.io/infra", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]}]
                }
            }
        },
        "podLabels": {"team": "platform", "app.kubernetes.io/component": "theirs"},
        "podAnnotations": {"sidecar.istio.io/inject": "false"},
        "resources": {"requests": {"cpu": 1, "memory": "512Mi"}, "limits": {"cpu": "2", "memory": "512Mi"}},
        "lameDuckSeconds": 30,
        "fullnameOverride": "checkpoints",
    },
    "on the nodes' network, by other ports": {
        "hostNetwork": True,
        "port": 10260,
        "httpPort": 10261,
        "networkPolicy": {
            "apiServerPorts": [6443],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
    },
    "events of some trainers": {
        "clusterEvents": {
            "enabled": True,
            "priorityBoost": True,
            "serviceAccounts": {"research": ["trainer", "eval"], "vision": ["trainer"]},
        }
    },
    "the console, with a token": {
        "console": {
            "enabled": True,
            "destination": "s3://bucket/runs",
            "credentials": "runs-read-only",
            "tokenSecret": "console-token",
        }
    },
    "the console, behind a proxy": {
        "console": {
            "enabled": True,
            "destination": "s3://bucket/runs",
            "endpointUrl": "https://minio.example:9000",
            "caBundle": "company-ca",
            "userHeader": "X-Forwarded-User",
            "trustedProxies": ["10.0.0.0/8", "fd00::7"],
            "refreshEvery": "1m",
            "abandonedAfter": "36h",
            "allowedFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}],
            "storePorts": [9000, 80],
            "serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/runs"},
            "podLabels": {"azure.workload.identity/use": "true", "app.kubernetes.io/component": "theirs"},
            "resources": {"requests": {"cpu": 1, "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
        },
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "image": {"pullSecrets": [{"name": "mirror"}]},
    },
    "nobody is warned of Jobs": {"admissionPolicies": {"enabled": False}},
    "one replica, no network policy": {"replicas": 1, "networkPolicy": {"enabled": False}},
}
