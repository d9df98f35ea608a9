"""Certificates that the webhook makes for itself: made before it serves, renewed while it does, on every replica.

What the ServiceAccount must be allowed, and nothing more (names as in `SelfManaged`):

| where | API group | resource | names | verbs |
|---|---|---|---|---|
| Role in the webhook's namespace | "" | secrets | any: RBAC cannot name what is yet to be created | create |
| the same | "" | secrets | `secret` | get, patch |
| the same | coordination.k8s.io | leases | any, as above | create |
| the same | coordination.k8s.io | leases | `lease` | get, patch |
| ClusterRole | admissionregistration.k8s.io | mutatingwebhookconfigurations | `configuration` | get, patch |

No list, no watch, no update, no delete. The chart must neither render the Secret and the Lease nor set `caBundle`: both are written
by the webhook alone, and every `clientConfig.caBundle` of the named configuration is ours. The certificates' folder must
be writable (an emptyDir, best with medium Memory).
"""
