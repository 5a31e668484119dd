"""``sublet budget``: what tenants and groups may spend in a window."""

from __future__ import annotations

from typing import Annotated

from sublet.cli.call import CommandOffice, NoOffice
from sublet.cli.declare import Arg, Opt
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson, name
from sublet.cli.show import Json, document, table, window_text
from sublet.errors import Disconnected, InvalidRequest

_Amount = Annotated[str, Arg("AMOUNT", help="Amount in the currency of rates.toml, such as 50 or 12.50.")]
_Tenant = Annotated[str | None, Opt("--tenant", metavar="NAME", parse=name, help="Tenant whose budget it is.")]
_Group = Annotated[str | None, Opt("--group", metavar="NAME", parse=name, help="Group whose budget it is.")]
_Per = Annotated[str, Opt("--per", metavar="WINDOW", help="Window: day, month (in UTC) or total (default: month).")]
_Currency = Annotated[
    str | None, Opt("--currency", metavar="NAME", help="Expected currency; the command fails if prices are in another.")
]


def change(
    *,
    amount: _Amount,
    tenant: _Tenant = None,
    group: _Group = None,
    per: _Per = "month",
    currency: _Currency = None,
    as_json: AsJson = False,
) -> int:
    """Set the budget of a tenant or a group.

    A new budget counts from now on. When 80 % are used there is a warning; when all is used up, requests are refused
    and leases end with notice, until the next window begins or credit is added.
    """
    body = {"amount": amount, "currency": currency, **_which(tenant, group, per)}
    answer: Json = CommandOffice.reach().post("/v1/budgets", body)
    return _print_result(answer, "is set", as_json)


def credit(
    *,
    amount: _Amount,
    tenant: _Tenant = None,
    group: _Group = None,
    per: _Per = "month",
    currency: _Currency = None,
    request_id: Annotated[
        str | None,
        Opt(
            "--request-id",
            metavar="ID",
            help="Id of this credit; a retry with the same id counts once (default: a new id).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Add credit to the present window of a budget.

    Leases that had notice because it was used up stay. The next window begins with the amount of the budget alone.
    """
    credit_id = CommandOffice.request_id() if request_id is None else request_id
    body = {"amount": amount, "currency": currency, "request_id": credit_id, **_which(tenant, group, per)}
    try:
        answer: Json = CommandOffice.reach().post("/v1/budgets/credit", body)
    except NoOffice:
        raise
    except Disconnected as error:
        raise Disconnected(
            f"{error.message}; whether the credit counts is not known",
            do=f"Repeat the command with --request-id {credit_id}: then it counts once.",
        ) from error
    return _print_result(answer, "has credit", as_json)


def rm(*, tenant: _Tenant = None, group: _Group = None, per: _Per = "month", as_json: AsJson = False) -> int:
    """Remove a budget. Leases that had notice because of it stay."""
    answer: Json = CommandOffice.reach().post("/v1/budgets/remove", _which(tenant, group, per))
    return _print_result(answer, "is removed", as_json)


def ls(*, as_json: AsJson = False) -> int:
    """List the budgets, what is used of each, and when each starts again."""
    found: list[Json] = CommandOffice.reach().get("/v1/budgets")
    if as_json:
        document(found)
        return DONE
    heads = ["BUDGET OF", "PER", "AMOUNT", "CREDIT", "USED", "CURRENCY", "STATE", "BEGINS ANEW"]
    rows = [
        [
            _whose(view),
            view["per"],
            view["amount"],
            view["credit"],
            view["used"],
            view["currency"],
            view["level"].replace("_", " "),
            "-" if view["resets_at"] is None else f"{view['resets_at'][:16].replace('T', ' ')} UTC",
        ]
        for view in found
    ]
    print(table(heads, rows, right=["AMOUNT", "CREDIT", "USED"]))
    return DONE


def _which(tenant: str | None, group: str | None, per: str) -> Json:
    if (tenant is None) == (group is None):
        raise InvalidRequest("a budget is of one tenant or of one group", do="Give --tenant NAME or --group NAME.")
    return {"tenant": tenant, "group": group, "per": per}


def _print_result(answer: Json, done: str, as_json: bool) -> int:
    if as_json:
        document(answer)
        return DONE
    added = f" and {answer['credit']} credit" if answer["credit"] != "0.00" else ""
    print(
        f"The budget of {_whose(answer)} {done}: {answer['amount']} {answer['currency']} {window_text(answer)}{added}, "
        f"{answer['used']} used."
    )
    return DONE


def _whose(view: Json) -> str:
    return f"group {view['group']}" if view["tenant"] is None else f"tenant {view['tenant']}"
