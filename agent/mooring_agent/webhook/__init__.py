"""The mutating admission webhook: HTTPS around `core.admission_review`, and the certificates it needs."""
