"""Kubernetes' quantities."""

import pytest

from keepstep_agent.core.injection.pod import parse_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", 0.5),
        ("2", 2),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1Gi", 2**30),
        ("10G", 10**10),
        ("1e3", 1000),
        (2, 2),
        ("100n", 1e-7),
    ],
)
def test_a_quantity_is_what_kubernetes_makes_of_it(text: object, number: float) -> None:
    assert float(parse_quantity(text)) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "1GB", "Gi", "1 Gi", "1e999999999", "0x10", "1.2.3", True, None, [], "9" * 1000])
def test_what_is_no_quantity_is_refused_at_once(text: object) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)
