"""A namespace with a LimitRange: what it adds to a pod and refuses, and the API server's two rounds of admission.

From k/k plugin/pkg/admission/limitranger/admission.go and pkg/apis/core/v1/defaults.go, for items of type Container.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonpatch
from tests.injection.api_server import canonical, stored
from tests.injection.golden_pods import inject

from keepstep_agent.core.injection.pod import parse_quantity
from keepstep_agent.core.injection.spec import InjectionDefaults, Mutation

Amounts = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRange:
    """One item, as an admin writes it."""

    default: Amounts = field(default_factory=dict)
    default_request: Amounts = field(default_factory=dict)
    most: Amounts = field(default_factory=dict)
    least: Amounts = field(default_factory=dict)
    ratio: Amounts = field(default_factory=dict)

    @property
    def limits(self) -> Amounts:
        return {**self.most, **self.default}

    @property
    def requests(self) -> Amounts:
        return {**self.least, **self.limits, **self.default_request}

    def complete(self, pod: Any) -> Any:
        """The plugin's first part. It runs before the webhooks, and once more after them."""
        made = copy.deepcopy(pod)
        for container in _containers(made):
            resources = container.setdefault("resources", {})
            for key, amounts in (("limits", self.limits), ("requests", self.requests)):
                if merged := {**amounts, **resources.get(key, {})}:
                    resources[key] = {name: canonical(amount) for name, amount in merged.items()}
        return made

    def problems(self, pod: Any) -> Iterator[str]:
        """The plugin's second part, and what the API server itself says of a request above its limit."""
        for container in _containers(pod):
            name, resources = container["name"], container.get("resources", {})
            requests, limits = ({**resources.get(key, {})} for key in ("requests", "limits"))
            for resource, amount in requests.items():
                if parse_quantity(amount) > parse_quantity(limits.get(resource, amount)):
                    yield f"{name}: must be less than or equal to {resource} limit of {limits[resource]}"
            for resource, least in self.least.items():
                if any(
                    parse_quantity(said.get(resource, least)) < parse_quantity(least) for said in (requests, limits)
                ):
                    yield f"{name}: minimum {resource} usage per Container is {least}"
            for resource, most in self.most.items():
                if resource not in limits or parse_quantity(limits[resource]) > parse_quantity(most):
                    yield f"{name}: maximum {resource} usage per Container is {most}"
            for resource, ratio in self.ratio.items():
                request, limit = (parse_quantity(said.get(resource, 0)) for said in (requests, limits))
                if not request or not limit or limit / request > parse_quantity(ratio):
                    yield f"{name}: {resource} max limit to request ratio per Container is {ratio}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What came of a pod. `problems`: why the API server refuses what our webhook made of it."""

    pod: Any
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def admit(pod: Any, limit_range: LimitRange, defaults: InjectionDefaults) -> Admitted:
    """Both rounds: the webhook is asked again because the plugins changed its containers (`IfNeeded`)."""
    warnings: tuple[str, ...] = ()
    for _ in range(2):
        pod = limit_range.complete(stored(pod))
        outcome = inject(pod, defaults)
        assert isinstance(outcome, Mutation), outcome
        warnings += outcome.warnings
        pod = stored(jsonpatch.apply_patch(pod, copy.deepcopy(list(outcome.patch))))
    return Admitted(pod=pod, problems=tuple(limit_range.problems(pod)), warnings=warnings)


def _containers(pod: Any) -> Iterator[Any]:
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]
