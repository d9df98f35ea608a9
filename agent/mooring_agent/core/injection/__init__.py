"""The injection: from a pod and its annotations to a JSON Patch, or to the reasons why there is none."""
