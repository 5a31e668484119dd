"""Autograd across cells: graphs stay where they were computed, and what was not touched is not overwritten."""

from __future__ import annotations

import pytest

from sublet.durable.rebuild import graph_hint
from sublet.errors import Unpicklable
from sublet.guest.current import note_graph_elsewhere
from sublet.notebook import operations
from sublet.notebook.untouchable import Untouchable
from tests.notebook.sides import Notebook, Other


@pytest.fixture
def nb(other: Other) -> Notebook:
    made = Notebook(other)
    made.here("import torch\ntorch.manual_seed(0)")
    return made


def both(nb: Notebook, expression: str) -> object:
    """The value of an expression, which must be the same on both sides."""
    assert nb.there(f"found_ = {expression}") is None
    with nb.at_home():
        here: object = eval(expression, nb.names)  # noqa: S307
    assert here == nb.names["found_"]
    return here


@pytest.mark.parametrize("made_there", [True, False])
@pytest.mark.parametrize("more", ["", "lr = 0.5"], ids=["", "beside a change"])
def test_backward_one_cell_later(nb: Notebook, made_there: bool, more: str) -> None:
    made = "x = torch.arange(3.)\nw = torch.ones(3, requires_grad=True)"
    assert (nb.there if made_there else nb.here)(made) is None
    assert nb.there("lr = 0.1\nloss = (w * x).sum()") is None
    nb.here(f"{more}\nshown = str(loss), loss.item()")
    assert nb.names["shown"] == ("tensor(3., grad_fn=<SumBackward0>)", 3.0)
    assert nb.there("loss.backward()") is None
    assert both(nb, "w.grad.tolist()") == [0.0, 1.0, 2.0]
    assert both(nb, "(w.is_leaf, w.requires_grad, loss.is_leaf, loss.requires_grad)") == (True, True, False, True)
    nb.here("with torch.no_grad(): w -= w.grad")
    assert nb.there("loss = (w * x).sum()") is None
    assert nb.there("w.grad = None; loss.backward()") is None
    assert both(nb, "(w.tolist(), loss.item(), w.grad.tolist())") == ([1.0, 0.0, -1.0], -2.0, [0.0, 1.0, 2.0])


def test_gradients_that_are_retained(nb: Notebook) -> None:
    """As in makemore, part 4: cell by cell, with gradients compared in later cells."""
    assert nb.there("a = torch.ones(2, requires_grad=True)\nb = a * 2\nc = b.exp()\nloss = c.sum()") is None
    assert nb.there("for t in (b, c): t.retain_grad()") is None
    assert nb.there("loss.backward()") is None
    assert nb.there("same = bool((c.grad == torch.ones(2)).all()) and torch.equal(b.grad, c.grad * c)") is None
    assert nb.names["same"] is True
    assert both(nb, "c.grad.tolist()") == [1.0, 1.0]
    assert nb.here("same = torch.equal(b.grad, c.grad * c)") is None
    assert nb.names["same"] is True


def test_a_part_of_a_tensor_that_has_a_graph_is_no_leaf(nb: Notebook) -> None:
    """It lies in memory that is here already, and its graph stays where it was made."""
    nb.here("w = torch.ones(3, requires_grad=True)")
    assert nb.there("part = w[1:]; part.retain_grad(); plain = w.detach()[:1]; plain.of = [w]") is None
    assert both(nb, "(part.is_leaf, part.requires_grad, part.tolist())") == (False, True, [1.0, 1.0])
    assert nb.there("part.sum().backward()") is None
    assert both(nb, "(part.grad.tolist(), w.grad.tolist())") == ([1.0, 1.0], [0.0, 1.0, 1.0])
    assert both(nb, "(plain.is_leaf, plain.requires_grad, plain.of[0] is w)") == (True, False, True)
    assert nb.here("part.sum().backward()") == "RuntimeError"


def test_a_model_and_its_optimizer_keep_the_same_parameters(nb: Notebook) -> None:
    nb.here("model = torch.nn.Linear(2, 1); opt = torch.optim.Adam(model.parameters(), 0.1); x = torch.ones(4, 2)")
    before = nb.names["model"].weight
    assert nb.there("loss = model(x).sum()") is None
    assert nb.there("opt.zero_grad(); loss.backward()") is None
    assert nb.there("opt.step()") is None
    assert nb.names["model"].weight is before
    assert nb.names["opt"].param_groups[0]["params"][0] is before
    assert both(nb, "model.weight.grad.tolist()") == [[4.0, 4.0]]
    assert both(nb, "len(opt.state[model.weight]) > 0") is True


def test_a_graph_is_where_it_was_computed_and_backward_elsewhere_says_so(nb: Notebook) -> None:
    assert nb.there("w = torch.ones(3, requires_grad=True)\nloss = (w * 2).sum()") is None
    with pytest.raises(RuntimeError, match=r"computed in the other process.*both in %%gpu"):
        nb.names["loss"].backward()
    nb.here("more = loss * 2")
    assert nb.there("try:\n    more.backward()\nexcept RuntimeError as error:\n    said = str(error)") is None
    assert "autograd graph is" in str(nb.names["said"])
    assert nb.there("loss.backward()") is None


def test_autograd_grad_elsewhere_gets_a_hint(nb: Notebook) -> None:
    """PyTorch looks for the inputs before it runs anything, and its error does not say where the graph is."""
    import torch

    assert nb.there("w = torch.ones(3, requires_grad=True)\nloss = (w * 2).sum()") is None
    with pytest.raises(RuntimeError) as raised:
        torch.autograd.grad(nb.names["loss"], [nb.names["w"]])
    assert "both in %%gpu cells" in graph_hint(raised.value)
    assert graph_hint(RuntimeError("another")) == ""
    note_graph_elsewhere(raised.value)
    note_graph_elsewhere(raised.value)
    assert raised.value.__notes__ == [graph_hint(raised.value)]


def test_what_was_changed_beside_its_graph_is_refused_by_name(nb: Notebook) -> None:
    assert nb.there("w = torch.ones(3, requires_grad=True)\ny = w * 2") is None
    nb.here("with torch.no_grad(): y += 1")
    with pytest.raises(Exception, match=r"^y cannot be put together.*autograd graph.*detach\(\).clone\(\)"):
        nb.there("z = y.sum()")
    nb.here("y = y.detach().clone()")
    assert nb.there("z = y.sum()") is None
    assert both(nb, "z.item()") == 9.0


def test_tensors_that_share_memory_go_on_doing_so(nb: Notebook) -> None:
    assert nb.there("w = torch.ones(4, requires_grad=True)\ny = w * 2\nz = y[1:3]") is None
    nb.here("with torch.no_grad(): y[1] = 7")
    assert nb.names["z"].tolist() == [7.0, 2.0]


def test_backward_after_the_tensors_of_the_graph_came_again_unchanged(nb: Notebook) -> None:
    """PyTorch counts writes to a tensor, and refuses a graph that has kept one which was written to since."""
    assert nb.there("C = torch.ones(5, 4, requires_grad=True); W = torch.ones(4, 3, requires_grad=True)") is None
    nb.here("parameters = [C, W]")
    assert nb.there("loss = ((C @ W) ** 2).sum(); n = 1") is None
    nb.here("n = 2")
    assert nb.there("n += len(parameters); loss.backward()") is None
    assert both(nb, "C.grad[0].tolist()") == [24.0] * 4


def test_new_gradients_bring_no_old_values_of_what_once_crossed_together_with_their_tensors(nb: Notebook) -> None:
    nb.here("model = torch.nn.Linear(2, 1); history = [1]; ones = torch.ones(1, 2)")
    assert nb.there("kept = (model, history)[0]; history.append(2)") is None
    nb.here("history.append(3)")
    assert nb.there("model(ones).sum().backward()") is None
    assert nb.names["history"] == [1, 2, 3]
    assert nb.names["model"].weight.grad is not None
    assert nb.there("loss = model(ones).sum()") is None
    nb.here("history.append(4)")
    assert nb.there("loss.backward()") is None
    assert nb.names["history"] == [1, 2, 3, 4]
    assert nb.names["model"].weight.grad.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("made_there", [True, False])
@pytest.mark.parametrize("kind", ["half", "double", "bfloat16"])
def test_a_model_with_gradients_gets_numbers_of_another_type(nb: Notebook, made_there: bool, kind: str) -> None:
    """Its parameters refuse gradients of the type that they had."""
    made = "net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)); opt = torch.optim.AdamW"
    made += "(net.parameters())\nnet(torch.ones(1, 2)).sum().backward(); grad = net[0].bias.grad"
    assert (nb.there if made_there else nb.here)(made) is None
    first = nb.names["net"][0].weight
    types = "{p.dtype for p in net.parameters()} | {p.grad.dtype for p in net.parameters()}"
    assert nb.there(f"net.{kind}(); found = {types}") is None
    assert nb.names["found"] == eval(types, nb.names)  # noqa: S307
    assert nb.names["torch"].float32 not in nb.names["found"]
    assert len(nb.names["found"]) == 1
    assert nb.names["net"][0].weight is first
    assert nb.there("net.float(); opt.step()") is None
    assert nb.names["grad"] is nb.names["net"][0].bias.grad
    assert nb.here(f"net.{kind}()") is None
    assert both(nb, types) == nb.names["found"]


class Fails:
    """Comes last, and cannot be written."""

    target, phase, is_fresh, written = (), operations.GRADED, False, None

    def resolve(self, stands_for: operations.StandsFor) -> bool:
        return True

    def check(self) -> None:
        return

    def apply(self) -> None:
        raise MemoryError

    def undo(self) -> None:
        return


@pytest.mark.parametrize("order", [1, -1])
def test_tensors_of_another_type_are_undone_with_their_gradients(order: int) -> None:
    import torch

    old, new = (torch.nn.Parameter(torch.ones(2, dtype=kind)) for kind in (torch.float32, torch.float16))
    old.sum().backward()
    new.sum().backward()
    before = old.grad
    assert before is not None
    writes = [operations.TensorMemory(old, new, new.grad, ()), operations.TensorMemory(before, new.grad, None, ())]
    for one in writes:
        one.is_fresh = False
    stands_for = {id(new.grad): before}
    with pytest.raises(Unpicklable, match="MemoryError"):
        operations.apply([Fails(), *writes[::order]], Untouchable(), lambda one: stands_for.get(id(one), one))
    assert old.grad is before
    assert old.dtype is before.dtype is torch.float32
    assert before.tolist() == [1.0, 1.0]
