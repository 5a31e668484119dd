"""What operators arrange between tenants: groups, reservations and budgets, as programs for both fabrics."""

from __future__ import annotations

from decimal import Decimal
from typing import Final, Literal, TypeVar
from urllib.parse import quote

from sublet.client.operations import REQUEST_TIMEOUT_S, OfficeOperations, new_request_id
from sublet.client.steps import Program
from sublet.errors import InvalidRequest
from sublet.values import valid_text
from sublet.wire.http import (
    BudgetRequest,
    BudgetView,
    ExplainAnswer,
    GroupRequest,
    GroupView,
    QuotaView,
    ReservationRequest,
    ReservationView,
)

T = TypeVar("T")
Amount = Decimal | int | str
"""Of money, exactly: ``"12.50"``, ``Decimal("12.50")`` or ``12``."""
Ceiling = int | Literal["none"] | None
"""None leaves it as it is; ``"none"`` takes it away."""
NO_CEILING: Final = "none"


def explain(core: OfficeOperations, lease: str) -> Program[ExplainAnswer]:
    return core.query(f"/v1/leases/{_named(lease, 'lease')}/explain", ExplainAnswer)


def groups(core: OfficeOperations) -> Program[list[GroupView]]:
    return core.query("/v1/groups", list[GroupView])


def add_group(
    core: OfficeOperations, name: str, weight: int | None, floor: int | None, ceiling: Ceiling, quota: QuotaView | None
) -> Program[GroupView]:
    body = _group(weight, floor, ceiling, quota, name=valid_text(name, "group"))
    return _changing(core, "POST", "/v1/groups", body, GroupView)


def set_group(
    core: OfficeOperations, name: str, weight: int | None, floor: int | None, ceiling: Ceiling, quota: QuotaView | None
) -> Program[GroupView]:
    return _changing(
        core, "PATCH", f"/v1/groups/{_named(name, 'group')}", _group(weight, floor, ceiling, quota), GroupView
    )


def remove_group(core: OfficeOperations, name: str) -> Program[GroupView]:
    return _changing(core, "POST", f"/v1/groups/{_named(name, 'group')}/remove", {}, GroupView)


def reservations(core: OfficeOperations) -> Program[list[ReservationView]]:
    return core.query("/v1/reservations", list[ReservationView])


def add_reservation(
    core: OfficeOperations, name: str, when: str, group: str, gpus: int, zone: str, model: str | None
) -> Program[ReservationView]:
    body = ReservationRequest(id=name, group=group, gpus=gpus, when=when, zone=zone, model=model)
    return _changing(core, "POST", "/v1/reservations", body, ReservationView)


def remove_reservation(core: OfficeOperations, name: str) -> Program[ReservationView]:
    return _changing(core, "POST", f"/v1/reservations/{_named(name, 'reservation')}/remove", {}, ReservationView)


def budgets(core: OfficeOperations) -> Program[list[BudgetView]]:
    return core.query("/v1/budgets", list[BudgetView])


def set_budget(
    core: OfficeOperations, amount: Amount, tenant: str | None, group: str | None, per: str, currency: str | None
) -> Program[BudgetView]:
    body = BudgetRequest(tenant=tenant, group=group, per=per, amount=_amount(amount), currency=currency)
    return _changing(core, "POST", "/v1/budgets", body, BudgetView)


def credit_budget(
    core: OfficeOperations,
    amount: Amount,
    tenant: str | None,
    group: str | None,
    per: str,
    currency: str | None,
    request_id: str | None,
) -> Program[BudgetView]:
    body = BudgetRequest(
        tenant=tenant,
        group=group,
        per=per,
        amount=_amount(amount),
        currency=currency,
        request_id=request_id or new_request_id(),
    )
    return _changing(core, "POST", "/v1/budgets/credit", body, BudgetView)


def remove_budget(core: OfficeOperations, tenant: str | None, group: str | None, per: str) -> Program[BudgetView]:
    body = BudgetRequest(tenant=tenant, group=group, per=per)
    return _changing(core, "POST", "/v1/budgets/remove", body, BudgetView)


def _group(
    weight: int | None, floor: int | None, ceiling: Ceiling, quota: QuotaView | None, *, name: str | None = None
) -> GroupRequest:
    most = None if isinstance(ceiling, str) else ceiling
    return GroupRequest(
        id=name, weight=weight, floor=floor, ceiling=most, no_ceiling=ceiling == NO_CEILING, quota=quota
    )


def _amount(amount: Amount) -> str:
    if isinstance(amount, float):
        raise InvalidRequest(f"an amount of money is exact, and {amount} is a float", do='Write it as "12.50".')
    return str(amount)


def _named(name: str, what: str) -> str:
    return quote(valid_text(name, what), safe="")


def _changing(core: OfficeOperations, method: str, path: str, body: object, shape: type[T]) -> Program[T]:
    return core.command(method, path, body, shape, REQUEST_TIMEOUT_S)
