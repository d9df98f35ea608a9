"""Chooses the cloud whose notices to read: the configured one, or the one whose metadata service answers."""

import asyncio
from collections.abc import Sequence

from keepstep_agent.adapters.preemption.aws import AwsPreemption
from keepstep_agent.adapters.preemption.azure import AzurePreemption
from keepstep_agent.adapters.preemption.gcp import GcpPreemption
from keepstep_agent.adapters.preemption.metadata_service import MetadataService
from keepstep_agent.ports import PreemptionSource


def clouds(wanted: str, endpoint: str) -> Sequence[PreemptionSource]:
    """Return the sources that the setting `preemption_source` may mean; all of them for `auto`."""
    every: list[PreemptionSource] = [
        AwsPreemption(MetadataService(endpoint)),
        GcpPreemption(MetadataService(endpoint)),
        AzurePreemption(MetadataService(endpoint)),
    ]
    return [one for one in every if wanted in (one.cloud, "auto")]


async def the_one_that_answers(candidates: Sequence[PreemptionSource]) -> PreemptionSource | None:
    """Ask all candidates at once, return the first that answers and close the others. Takes a few seconds at most."""
    answering = await asyncio.gather(*(one.answers() for one in candidates))
    found = next((one for one, answers in zip(candidates, answering, strict=True) if answers), None)
    for one in candidates:
        if one is not found:
            await one.close()
    return found
