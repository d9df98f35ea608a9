"""`python -m tests.injection.golden`: writes what the injection makes of each pod here; a person then reviews it."""

from tests.injection.golden_pods import write_outcomes

write_outcomes()
