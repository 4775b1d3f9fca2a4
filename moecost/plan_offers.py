"""What GPUs can be rented for: of each provider the cheapest quote for a number of them, whole machines as they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from moecost import catalog
from moecost.errors import UnknownNameError
from moecost.specs import Market, PriceQuote

GIVEN: Final = "given"
"""Provider of a price that was given as a number."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A number of GPUs of one kind at a provider.

    Attributes
    ----------
    quote : the price it comes from, of one GPU-hour.
    billed_gpus : GPUs that are paid for: those in use, and the rest of machines that are rented whole.
    """

    quote: PriceQuote
    billed_gpus: int
    num_gpus: int

    @property
    def usd_per_hour(self) -> float:
        """All of it. [$/h]"""
        return self.quote.usd_per_gpu_hour * self.billed_gpus

    @property
    def price(self) -> PriceQuote:
        """The quote as a price of each GPU in use: of `Job.price`."""
        if self.billed_gpus == self.num_gpus:
            return self.quote
        said = f"{self.billed_gpus} GPUs are rented whole for {self.num_gpus}, at {self.quote.usd_per_gpu_hour:g} each"
        each = self.usd_per_hour / self.num_gpus
        changes = {"usd_per_gpu_hour": each, "notes": "; ".join(filter(None, [self.quote.notes, said]))}
        return self.quote.model_copy(update=changes)


def offers(
    quotes: Iterable[PriceQuote], *, num_gpus: int, gpus_per_node: int, markets: Sequence[Market]
) -> list[Offer]:
    """The cheapest offer of each provider in each market.

    Machines whose GPUs the layout needs to be joined come first: a quote for a machine of 8 wins over one for single
    GPUs where 8 are asked for. Where a provider lists nothing that large, its price of a GPU is taken to hold for
    any number of them. A machine is rented whole, so that one GPU of a machine of 8 costs as much as 8.
    """
    needed = min(num_gpus, gpus_per_node)
    best: dict[tuple[str, str], tuple[bool, float, PriceQuote]] = {}
    for quote in quotes:
        if quote.market not in markets:
            continue
        billed = -(-num_gpus // quote.gpu_count) * quote.gpu_count
        found = quote.gpu_count < needed, quote.usd_per_gpu_hour * billed, quote
        key = quote.provider, quote.market
        if key not in best or found[:2] < best[key][:2]:
            best[key] = found
    return [Offer(quote, -(-num_gpus // quote.gpu_count) * quote.gpu_count, num_gpus) for _, _, quote in best.values()]


def check_providers(wanted: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Providers as the quotes spell them; `UnknownNameError` for one that none of them names."""
    by_name = {catalog.normalise(name): name for name in known}
    found = []
    for name in wanted:
        if catalog.normalise(name) not in by_name:
            raise UnknownNameError("provider", name, by_name.values(), f"Known: {', '.join(sorted(by_name.values()))}.")
        found.append(by_name[catalog.normalise(name)])
    return tuple(dict.fromkeys(found))
