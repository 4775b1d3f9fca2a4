"""What GPUs can be rented for: of each provider the cheapest quote for a number of them, in whole machines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from moecost import catalog
from moecost.errors import InvalidInputError, NoPriceError, UnknownNameError
from moecost.prices import PriceBook, shipped
from moecost.specs import GPUSpec, Market, PriceQuote

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
    quotes: Sequence[PriceQuote], *, num_gpus: int, gpus_per_node: int, markets: Sequence[Market]
) -> list[Offer]:
    """The cheapest offer of each provider in each market.

    A machine must hold the GPUs that a layout joins. It is rented whole: one GPU of a machine of 8 costs as much as 8.
    A provider of whom single GPUs alone are quoted is taken to rent any number of them joined, at that price.

    Parameters
    ----------
    quotes : of one GPU, all markets: they tell who rents out machines of several.
    num_gpus : GPUs of the run.
    gpus_per_node : GPUs of a machine, as the run is estimated.
    markets : those that may be used.
    """
    needed = min(num_gpus, gpus_per_node)
    sells_machines = {quote.provider for quote in quotes if quote.gpu_count > 1}
    best: dict[tuple[str, str], Offer] = {}
    for quote in quotes:
        large_enough = quote.gpu_count >= needed or quote.provider not in sells_machines
        if quote.market not in markets or not large_enough:
            continue
        offer = Offer(quote, -(-num_gpus // quote.gpu_count) * quote.gpu_count, num_gpus)
        key = quote.provider, quote.market
        if key not in best or offer.usd_per_hour < best[key].usd_per_hour:
            best[key] = offer
    return list(best.values())


@dataclass(frozen=True)
class Sellers:
    """Whose quotes a plan may use.

    Attributes
    ----------
    by_gpu : the quotes of the allowed providers, all markets.
    given : one price for all GPUs, in place of them.
    markets : those that may be used.
    named : providers and markets in words.
    """

    by_gpu: Mapping[str, tuple[PriceQuote, ...]]
    given: tuple[PriceQuote, ...]
    markets: tuple[Market, ...]
    named: str

    @classmethod
    def of(
        cls, book: PriceBook | None, price: Any, providers: str | Iterable[str] | None, markets: Sequence[Market]
    ) -> Self:
        """Check what was asked for.

        Raises
        ------
        InvalidInputError : a price that is none, an empty list of providers.
        UnknownNameError : a provider that no quote names.
        """
        if book is not None and not isinstance(book, PriceBook):
            raise InvalidInputError(f"prices={book!r:.80} is no price table; read one with moecost.prices.read(path)")
        market = " and ".join(markets)
        if price is not None:
            if providers is not None or book is not None:
                raise InvalidInputError("price is one for all GPUs; leave out providers and prices, or price")
            return cls({}, tuple(_given(price, kind) for kind in markets), tuple(markets), market)
        book = shipped() if book is None else book
        wanted = None if providers is None else _known(providers, {q.provider for q in book.quotes})
        by_gpu: dict[str, tuple[PriceQuote, ...]] = {}
        for quote in book.quotes:
            if wanted is None or quote.provider in wanted:
                by_gpu[quote.gpu] = (*by_gpu.get(quote.gpu, ()), quote)
        whose = "any provider" if wanted is None else " or ".join(wanted)
        return cls(by_gpu, (), tuple(markets), f"{whose} ({market})")

    def gpus(self) -> tuple[list[str], int]:
        """(GPUs of the catalogue that have a quote, how many have none); all of them where a price is given."""
        every = catalog.gpus()
        if self.given:
            return list(every), 0
        found = [name for name in every if any(q.market in self.markets for q in self.by_gpu.get(name, ()))]
        if not found:
            raise NoPriceError(f"no quote of {self.named}; allow other providers or markets, or give price=")
        return found, len(every) - len(found)

    def offers(self, asked: Any, gpu: GPUSpec, *, num_gpus: int, gpus_per_node: int) -> list[Offer]:
        """See the function of this name; of a GPU that was asked for as an instance type those of that type."""
        quotes = self.given or self.by_gpu.get(gpu.name, ())
        if isinstance(asked, str) and catalog.instance(asked) is not None:
            quotes = (
                tuple(q for q in quotes if catalog.normalise(q.instance_type) == catalog.normalise(asked)) or quotes
            )
        return offers(quotes, num_gpus=num_gpus, gpus_per_node=gpus_per_node, markets=self.markets)


def _given(price: Any, market: Market) -> PriceQuote:
    if isinstance(price, PriceQuote):
        return price.model_copy(update={"market": market})
    if isinstance(price, bool) or not isinstance(price, int | float) or not 0.0 < price < math.inf:
        raise InvalidInputError(
            f"price={price!r:.80}: give $/GPU-hour above 0 or a PriceQuote, or providers=[...] to choose among quotes"
        )
    return PriceQuote(usd_per_gpu_hour=float(price), provider=GIVEN, market=market)


def _known(wanted: str | Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Providers as the quotes spell them."""
    names = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(names, list | tuple | set | frozenset) or not names:
        raise InvalidInputError(f"providers={wanted!r:.80} names none; give a list of names, or leave it out for all")
    by_name = {catalog.normalise(name): name for name in sorted(known)}
    found = []
    for name in names:
        if not isinstance(name, str) or catalog.normalise(name) not in by_name:
            every = by_name.values()
            raise UnknownNameError("provider", str(name), every, f"Known: {', '.join(every)}.")
        found.append(by_name[catalog.normalise(name)])
    return tuple(dict.fromkeys(found))
