"""The mutating admission webhook: HTTPS around `core.injection.admission_review`, and the certificates it needs."""
