"""The mutating admission webhook: HTTPS for `core.injection.admission_review`, and the certificates it needs."""
