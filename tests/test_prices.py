"""Price quotes: what the catalogue holds, the median, and what is said where there is none."""

from __future__ import annotations

import statistics

import pytest

from moecost import catalog
from moecost.errors import InvalidInputError, NoPriceError, UnknownNameError
from moecost.specs import GPUSpec, PriceQuote

ALL = [q for gpu in catalog.gpus() for q in catalog.quotes(gpu)]


def test_every_row_belongs_to_a_gpu_of_the_catalogue() -> None:
    lines = (catalog.data_folder("gpu_specs") / catalog.PRICES_FILE).read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if not line.startswith("#")][1:]
    assert len(ALL) == len(rows) == 593


def test_rows_are_consistent() -> None:
    for q in ALL:
        assert 0.01 < q.usd_per_gpu_hour < 20
        assert q.usd_per_hour_instance == pytest.approx(q.usd_per_gpu_hour * q.gpu_count, rel=2e-3)
        assert q.source
        assert q.date
        assert q.provider


@pytest.mark.parametrize(("gpu", "price"), [("a40", 0.79), ("a100-80gb-pcie", 1.67), ("h100-80gb-pcie", 2.10)])
def test_prices_of_the_paper(gpu: str, price: float) -> None:
    """arXiv:2408.04693, Table IV, CUDO Compute."""
    found = [q for q in catalog.quotes(gpu, provider="CUDO") if "2408.04693" in q.source]
    assert [(q.usd_per_gpu_hour, q.date, q.market) for q in found] == [(price, "2024-08", "on_demand")]


def test_median_is_a_quote_with_half_the_others_on_each_side() -> None:
    for gpu in {q.gpu for q in ALL}:
        prices = [q.usd_per_gpu_hour for q in catalog.quotes(gpu, market="on_demand")]
        if prices:
            quote = catalog.median_quote(gpu)
            assert quote in catalog.quotes(gpu)
            assert quote.usd_per_gpu_hour == statistics.median_low(prices)


def test_filters() -> None:
    spot = catalog.quotes("H100", market="spot", provider="AWS")
    assert spot
    assert {(q.market, q.provider, q.gpu) for q in spot} == {("spot", "aws", "h100-80gb-sxm")}
    assert catalog.median_quote("h100", "spot", "aws") in spot
    assert catalog.quotes(GPUSpec.load("a40")) == catalog.quotes("NVIDIA A40")
    assert catalog.quotes("h100", provider="nobody") == ()


def test_no_price_lists_what_there_is() -> None:
    with pytest.raises(NoPriceError, match=r"no reserved price of a40; .*cudo on_demand \$0\.3.*Pass price="):
        catalog.median_quote("a40", "reserved")
    with pytest.raises(NoPriceError, match="no on_demand price of a40 from 'aws'"):
        catalog.median_quote("a40", provider="aws")
    with pytest.raises(NoPriceError, match=r"no quote of it at all\. Pass price=<\$/GPU-hour>\.$"):
        catalog.median_quote("k80")


def test_a_gpu_of_your_own_has_no_price() -> None:
    mine = GPUSpec.load("a40").model_copy(update={"name": "mine"})
    with pytest.raises(NoPriceError, match="mine"):
        catalog.median_quote(mine)
    with pytest.raises(UnknownNameError):
        catalog.median_quote("mine")


def test_market_is_checked() -> None:
    with pytest.raises(InvalidInputError, match=r"market='on-demand' must be one of on_demand, spot, reserved"):
        catalog.quotes("a40", market="on-demand")


def test_a_bare_price_is_a_quote() -> None:
    quote = PriceQuote(usd_per_gpu_hour=0.5, gpu_count=4)
    assert (quote.usd_per_hour_instance, quote.market, quote.date) == (2.0, "on_demand", "undated")
    assert PriceQuote.model_validate({"usd_per_hour_instance": 8.0, "gpu_count": 8}).usd_per_gpu_hour == 1.0
