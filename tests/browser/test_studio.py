"""A person at the page of the studio, in a real browser: signs in, waits in the queue, gets the lease, ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import sublet
from sublet.studio.office import sessions_folder
from sublet.studio.plan import Plan, Queue, save_plan
from tests.browser.lab import PATIENCE_MS, PICTURES, browser
from tests.integration.office_stage import office_stage
from tests.integration.studio_stage import StudioStage, studio_stage

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.browser, pytest.mark.slow]

Visit: TypeAlias = Callable[..., Any]


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudioStage]:
    with office_stage(tmp_path_factory.mktemp("office"), "1x16GiB") as office, studio_stage(office) as stage:
        stage.tenant("physics")
        yield stage


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for all; its start is most of what a look at a page costs."""
    with browser() as made:
        yield made


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visit]:
    """A page of a person who has been nowhere yet: nothing of another test's is known to it."""
    contexts = []

    def opened(**more: Any) -> Any:
        contexts.append(chromium.new_context(**{"viewport": {"width": 1000, "height": 900}, **more}))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE_MS)
        return page

    yield opened
    for context in contexts:
        context.close()


def picture(page: Any, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


def test_a_person_signs_in_waits_gets_the_gpu_and_ends(studio: StudioStage, visit: Visit) -> None:
    """The page changes without being loaded again, what is typed into a form stays, a request that waits shows its
    place, reason and estimate; nothing is fetched from elsewhere, and nothing goes wrong in the console."""
    ana = studio.member("ana", "physics")
    wrong: list[str] = []
    page = visit()
    with sublet.connect(home=studio.home) as owner:
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("request", lambda sent: None if sent.url.startswith(studio.address) else wrong.append(sent.url))
        page.goto(studio.address)
        picture(page, "studio-sign-in")
        page.get_by_label("Your token").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("The token is not known here.").wait_for()
        wrong.clear()  # the browser notes the 401
        picture(page, "studio-refused")
        page.get_by_label("Your token").fill(ana.token)
        page.keyboard.press("Enter")
        page.get_by_text("No sessions.").wait_for()
        picture(page, "studio-empty")
        assert ana.token not in page.content()
        with owner.gpu(min_vram="16GiB", ttl="10m") as held, held.activity():
            page.get_by_label("Name").fill("thesis")
            page.get_by_label("GPU memory").fill("8GiB")
            page.keyboard.press("Enter")
            page.get_by_text("waiting, place 1").wait_for()
            picture(page, "studio-waiting")
            page.evaluate("window.isTheSame = true")
            page.get_by_label("Name").fill("half typed")
        page.get_by_text("time left").wait_for()
        assert page.evaluate("window.isTheSame === true"), "it was not loaded again"
        assert page.get_by_label("Name").input_value() == "half typed"
        picture(page, "studio-active")
        assert not wrong
        page.get_by_role("button", name="Rest: give the GPU back").click()
        page.get_by_text("released").wait_for()
        picture(page, "studio-resting")
        page.get_by_role("button", name="Resume", exact=True).click()
        page.get_by_text("time left").wait_for()
        lease = ana.done("GET", "/v1/sessions/thesis")["lease"]
        with sublet.connect(home=studio.home, for_tenant="physics") as program, program.attach(lease).activity():
            page.get_by_text("active, busy").wait_for()
            page.get_by_role("button", name="End", exact=True).click()
            page.get_by_text("Something runs in session thesis").wait_for()
            picture(page, "studio-asks")
            page.get_by_role("button", name="End it now").click()
            page.get_by_text("Ended (1)").wait_for()
        assert page.locator("details#ended").get_attribute("open") is None
        page.get_by_text("Ended (1)").click()
        picture(page, "studio-ended")
        studio.people.new_token("ana")
        page.get_by_label("Your token").wait_for()  # its sign-in is over, and the page asks again
        assert page.url == f"{studio.address}/sign-in"


def test_a_browser_that_slept_for_a_day_asks_for_the_sign_in(studio: StudioStage, visit: Visit) -> None:
    """Before, while a proxy answered for the studio, the page tried again by itself, and was not loaded again."""
    eve = studio.member("eve", "physics")
    page = visit()
    page.clock.install()
    page.goto(studio.address)
    page.get_by_label("Your token").fill(eve.token)
    page.keyboard.press("Enter")
    page.get_by_text("No sessions.").wait_for()
    page.evaluate("window.isTheSame = true")
    away = True

    def by_proxy(route: Any) -> None:
        if away and route.request.resource_type != "document":
            route.fulfill(status=502)
        else:
            route.fallback()

    page.route("**/*", by_proxy)
    page.clock.fast_forward("01:00:00")
    page.get_by_text("Connection lost").wait_for()
    away = False
    page.get_by_text("Connection lost").wait_for(state="hidden")
    assert page.evaluate("window.isTheSame === true")

    def in_the_morning(route: Any) -> None:
        studio.people.revoke("eve")  # as a sign-in is over after 12 hours
        route.fallback()

    page.route("**/live", in_the_morning)
    page.clock.fast_forward("24:00:00")
    page.get_by_label("Your token").wait_for()
    assert page.url == f"{studio.address}/sign-in"


def test_the_page_on_a_phone_in_the_dark_without_scripts(studio: StudioStage, visit: Visit) -> None:
    """By keyboard alone; nothing is wider than the screen."""
    bea = studio.member("bea", "physics")
    for number in range(3):
        bea.done("POST", "/v1/sessions", {"name": f"experiment-{number}", "vram": 1 << 30, "later": number != 1})
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "java_script_enabled": False}
    page = visit(**phone)
    page.goto(studio.address)
    page.keyboard.press("Tab")
    page.keyboard.type(bea.token)
    page.keyboard.press("Enter")
    page.get_by_text("experiment-2").wait_for()
    picture(page, "studio-phone")
    for card in page.locator("article").all():
        box = card.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 360


def test_an_operator_at_the_page_of_the_office(studio: StudioStage, visit: Visit) -> None:
    """It changes by itself; a drain is asked about. In the dark, on a phone, nothing but tables is wider."""
    cora = studio.member("cora", "physics")
    studio.people.set_role("cora", operator=True)
    dan = studio.member("dan", "physics")
    page = visit()
    with sublet.connect(home=studio.home) as owner:
        page.goto(studio.address)
        page.get_by_label("Your token").fill(cora.token)
        page.keyboard.press("Enter")
        page.get_by_role("link", name="Office").click()
        page.get_by_text("0 waiting").wait_for()
        with owner.gpu(min_vram="16GiB", ttl="10m", name="training-run") as held, held.activity():
            dan.done("POST", "/v1/sessions", {"name": "thesis", "vram": 8 << 30})
            page.get_by_text("1 waiting").wait_for()
            page.locator("svg.timeline rect.held").first.wait_for()
            picture(page, "studio-office")
            page.set_viewport_size({"width": 360, "height": 740})
            page.emulate_media(color_scheme="dark")
            picture(page, "studio-office-phone")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
        dan.done("POST", "/v1/sessions/thesis/end", {"now": True})
        page.get_by_role("button", name="Drain").click()
        page.get_by_text("No new lease is granted there").wait_for()
        picture(page, "studio-office-asks")
        page.get_by_role("link", name="No, back to the office").click()
        page.get_by_role("link", name="Audit log").click()
        page.get_by_label("Lease, tenant or device").fill("physics")
        page.get_by_label("Your access token of the office").fill(studio.operators_token())
        page.keyboard.press("Enter")
        page.get_by_role("cell", name="tenant_set").first.wait_for()
        picture(page, "studio-office-audit")


def test_a_teacher_at_the_page_of_the_course(studio: StudioStage, visit: Visit) -> None:
    """It changes by itself. In the dark, on a phone, nothing but tables is wider."""
    ask = studio.office.office.ask
    assert ask("POST", "/v1/groups", {"id": "ml1", "weight": 3, "floor": 1}).status == 201
    studio.tenant("class")
    assert ask("PATCH", "/v1/tenants/class", {"group": "ml1"}).status == 200
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 10 * 86_400))  # it begins when no test runs
    reserved = {"id": "exam", "group": "ml1", "gpus": 1, "when": f"{day} 10:00-12:00", "zone": "UTC"}
    assert ask("POST", "/v1/reservations", reserved).status == 201
    lines = [Queue(gpus=8, at_once=0.991, median_s=0, p95_s=70, longest=9)]
    lines.append(Queue(gpus=7, at_once=0.94, median_s=0, p95_s=310, longest=31))
    plan = Plan(made_at="2026-03-01T10:00:00Z", now=lines[0], less=lines[1])
    save_plan(sessions_folder(str(studio.home)), "ml1", plan)
    members = [studio.member(name, "class") for name in ("hal", "ida", "jon")]
    teacher = studio.member("tea", "physics")
    studio.people.set_role("tea", teaches=["ml1"])
    page = visit()
    page.goto(studio.address)
    page.get_by_label("Your token").fill(teacher.token)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Course ml1").click()
    page.get_by_text("No member of the course has a GPU").wait_for()
    members[0].done("POST", "/v1/sessions", {"name": "lab-1", "vram": 12 << 30})
    page.get_by_text("1 with a GPU").wait_for()
    lease = members[0].done("GET", "/v1/sessions/lab-1")["lease"]
    with (
        sublet.connect(home=studio.home, for_tenant="class") as program,
        program.attach(lease) as held,
        held.activity(),
    ):
        members[1].done("POST", "/v1/sessions", {"name": "lab-1", "vram": 12 << 30})
        page.get_by_text("1 with a GPU, 1 waiting").wait_for()
        picture(page, "studio-course")
        page.set_viewport_size({"width": 360, "height": 740})
        page.emulate_media(color_scheme="dark")
        picture(page, "studio-course-phone")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for one in members[:2]:
        one.done("POST", "/v1/sessions/lab-1/end", {"now": True})


def test_an_invite_is_put_into_the_form_and_not_kept_in_the_address(studio: StudioStage, visit: Visit) -> None:
    studio.people.add("gil", "physics")
    invite = studio.people.invite("gil")
    page = visit()
    page.goto(f"{studio.address}/join#{invite}")
    page.wait_for_url(f"{studio.address}/join")
    page.get_by_role("button", name="Join").click()
    page.get_by_text("Welcome, gil").wait_for()
    picture(page, "studio-joined")
    assert invite not in page.content()
    page.get_by_role("link", name="Go to your sessions").click()
    page.get_by_text("gil · tenant physics").wait_for()
