"""What `core/annotations.py` and `core/pod_mutation.py` are made of: one question about a pod in each module."""
