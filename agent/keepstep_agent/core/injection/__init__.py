"""Turns a pod and its annotations into a JSON Patch, or into the reasons why there is none."""
