"""What programs do around their steps has one device's numbers on every layout, or is an error."""

import io

import pytest
import torch
from program_ways import LAYOUTS, WAYS, distributed, loaded_when_deferred, make, ranks_of, result
from vescale_comm import simulate
from vescale_dtensor.state_dict import pickled
from vescale_parallel import ParallelError

REFUSED: dict[tuple[str, str], str] = {
    (way, layout): "a model whose stages lie on several ranks cannot be copied"
    for way in ("average_of_weights", "deep_copy")
    for layout in ("pp", "pp zero3")
}


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_of_one_device(way: str, layout: str, static: bool):
    refused = REFUSED.get((way, layout))

    def on_a_rank(rank: int, world_size: int) -> list[float]:
        plain = loaded_when_deferred() if way == "loaded" else make()
        model = distributed(plain, layout, static=static)
        if refused is None:
            return result(way, model)
        with pytest.raises(Exception, match=refused):
            result(way, model)
        return []

    expected = torch.tensor(result(way, make()) if refused is None else [])
    for found in simulate(ranks_of(layout)).run(on_a_rank):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_is_not_saved_as_an_object(layout: str, static: bool):
    def on_a_rank(rank: int, world_size: int) -> None:
        model = distributed(make(), layout, static=static)
        with pickled("whole"), pytest.raises(ParallelError, match="Save its state"):
            torch.save(model, io.BytesIO())

    simulate(ranks_of(layout)).run(on_a_rank)
