"""What `helm test` runs in the cluster, with the image's Python: a review of a pod, as the API server would send it.

Arguments: the webhook's URL and the file of its CA. It ends with 0 where the answer injects Keepstep into that pod.
"""

import base64
import json
import ssl
import sys
import urllib.request

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "helm-test",
        "annotations": {
            "keepstep.dev/inject": "true",
            "keepstep.dev/destination": "s3://bucket/helm-test",
            # Values may name another one for all pods.
            "keepstep.dev/container": "trainer",
        },
    },
    "spec": {"containers": [{"name": "trainer", "image": "trainer"}]},
}
REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "helm-test",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "default",
        "operation": "CREATE",
        "userInfo": {"username": "helm-test"},
        "object": POD,
        "dryRun": True,
    },
}


def main(url: str, authority: str) -> str:
    request = urllib.request.Request(url, json.dumps(REVIEW).encode(), {"Content-Type": "application/json"})
    context = ssl.create_default_context(cafile=authority)
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        response = json.load(answer)["response"]
    if not response["allowed"]:
        return response["status"]["message"]
    patch = base64.b64decode(response.get("patch", "")).decode()
    if "keepstep-agent" not in patch:
        return f"the answer injects no agent: {patch or response}"
    print("the webhook answers by its Service and its CA, and injects Keepstep")
    return ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
