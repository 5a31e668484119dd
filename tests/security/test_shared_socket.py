"""The shared sockets, used by real processes of other users: what each may do there, and what nobody may.

Root's office and an ordinary user's, two tenants with a user each (ana must show her token, ben need not), and a user
who is nobody's.
"""

from __future__ import annotations

import contextlib
import encodings.ascii  # noqa: F401 - the owner of an office may not be able to read the interpreter's files
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.errors import Unauthorized
from sublet.office.api.routes import ROUTES, Right
from sublet.studio.people import TOKEN_PREFIX
from sublet.wire.guests import HolderCall
from sublet.wire.zygote import COLD_VARIABLE, TENANT_WARM_VARIABLE
from tests.integration.test_tenant_matrix import example
from tests.security.other_users import ROOT, User, closed_folder
from tests.traces import supervisor_of, until

pytestmark = [
    pytest.mark.needs("setpriv"),
    pytest.mark.needs("unshare"),
    pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root"),
    pytest.mark.skipif(closed_folder(ROOT) is not None, reason="other users cannot enter this checkout"),
]
ANA, BEN, STRANGER, OWNER, LEE = 64_001, 64_002, 64_003, 64_004, 64_005


class Owner(User):
    """The user whose office it is."""

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """This process is that user meanwhile, and can be root again."""
        groups = os.getgroups()
        os.setgroups([])
        os.setresgid(self.uid, self.uid, 0)
        os.setresuid(self.uid, self.uid, 0)
        try:
            yield
        finally:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            os.setgroups(groups)

    def up(self, *words: str) -> None:
        done = self.sublet("up", *words, SUBLET_HOME=f"{self.folder}/office")
        assert done.returncode == 0, done


@dataclass
class Place:
    home: Path
    shared: Path
    owner: Owner
    fabric: sublet.Fabric
    """The owner's."""
    ana: User
    ben: User
    stranger: User

    @property
    def url(self) -> str:
        return f"unix://{self.shared}/office.sock"

    def request(self, *words: Any, shape: Any) -> Any:
        """The owner's."""
        with self.owner.acting():
            return self.fabric.request(*words, shape=shape)


PLAIN: Final = {COLD_VARIABLE: "torch,warp,matplotlib_inline", TENANT_WARM_VARIABLE: "no"}
"""Warm interpreters are of no interest here: one for both tenants, without what takes long to import."""


ROOTS: Final = pytest.param(0, id="root", marks=pytest.mark.xdist_group("shared_socket_root"))
ORDINARY: Final = pytest.param(OWNER, id="ordinary", marks=pytest.mark.xdist_group("shared_socket_ordinary"))
"""Whose office it is. Each is used by one process of the suite, and the two at the same time."""


@pytest.fixture(scope="module", params=[ROOTS, ORDINARY])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with (
        tempfile.TemporaryDirectory(prefix="sublet-shared-", dir="/tmp", ignore_cleanup_errors=True) as text,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(text)
        folder.chmod(0o755)
        owner = Owner(request.param, folder / "owner", "", env=PLAIN)
        home, shared = owner.folder / "office", owner.folder / "shared"
        owner.up("--host-gpus", "3x1GiB", "--shared", str(shared))
        with owner.acting():
            runtime = runtime_dir(home.resolve())
            fabric = stack.enter_context(sublet.connect(home=home))
        stack.callback(shutil.rmtree, runtime, ignore_errors=True)
        stack.callback(until, "the end of the supervisor", lambda: supervisor_of(runtime) is None)
        url = f"unix://{shared}/office.sock"
        users = [User(uid, folder / str(uid), url) for uid in (ANA, BEN, STRANGER)]
        made = Place(home, shared, owner, fabric, *users)
        stack.callback(made.request, "POST", "/v1/down", {"how": "now"}, shape=dict)
        body: dict[str, Any] = {"id": "ana", "uid": ANA}
        made.ana.token = made.request("POST", "/v1/tenants", body, shape=dict)["token"]
        made.request("POST", "/v1/tenants", {"id": "ben", "uid": BEN, "needs_token": False}, shape=dict)
        yield made


WORK: Final = """
import faulthandler, json, logging, os, sys
faulthandler.dump_traceback_later(240, exit=True)
import numpy as np
import sublet

records = []
class Keep(logging.Handler):
    def emit(self, record): records.append((record.name, record.getMessage()))
logging.getLogger().addHandler(Keep())

def work(numbers):
    import logging, os
    logging.getLogger("theirs").warning("at work: %d", len(numbers))
    return os.getuid(), float(numbers.sum())

found = {"uid": os.getuid()}
with sublet.connect() as fabric:
    with fabric.gpu(min_vram="64MiB") as lease:
        found["lease"] = lease.id
        found["work"] = lease.run(work, np.arange(1 << 18))
        with sublet.GpuSession(lease) as gpu:
            x = gpu.mem_alloc(16)
            gpu.mem_write(x, 0, b"0123456789abcdef")
            found["device"] = bytes(gpu.mem_read(x, 4, 4)).decode()
    with fabric.block("64MiB", name="ckpt") as block:
        state = sublet.Durable({"step": 0, "weights": np.zeros(1 << 17)}, block, keep=2)
        for step in range(4):
            state.mutate(lambda value: (value.update(step=value["step"] + 1), value["weights"].__setitem__(step, 1.0)))
            found["number"] = state.checkpoint().number
        found["folder"] = state._store.folder.as_posix()
        try:
            os.listdir(found["folder"])
        except PermissionError:
            found["kept out"] = True
    with fabric.attach("ckpt") as block:
        again = sublet.Durable.restore(block)
        found["restored"] = [again.value["step"], float(again.value["weights"].sum())]
    fabric.copy_volume("ckpt", "copy")
    with fabric.attach("copy") as block:
        found["copied"] = sublet.Durable.restore(block).value["step"]
found["records"] = records
if len(sys.argv) > 1:
    print(json.dumps(found))
    sys.exit()

from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in ("%load_ext sublet", "seen = [1]", "%%gpu --vram 64MiB\\nimport os\\nseen.append(os.getuid())",
             "seen[0] += 1", "%%gpu --vram 64MiB\\nseen.append(seen[0])", "%gpu release"):
    shell.run_cell(cell).raise_error()
found["cells"] = shell.user_ns["seen"]

import asyncio
from sublet import aio
async def main():
    async with await aio.connect() as fabric:
        async with fabric.gpu(min_vram="64MiB") as lease:
            return await lease.run(os.getuid)
found["aio"] = asyncio.run(main())
print(json.dumps(found))
"""


def test_a_tenants_programs_run_as_its_own_user(place: Place) -> None:
    """Calls, device sessions, log records, saves from the holder's own process, a copy of a volume, cells, commands,
    asyncio: all of it by a user that may not enter the office's folders. Guests of root's tenants are different users
    again."""
    ana, is_roots = place.ana, not place.owner.uid
    found = ana.program(WORK, *(() if is_roots else ("without cells",)))  # they take ten seconds, and are the same
    assert found["uid"] == ANA
    assert found["work"][1] == float(sum(range(1 << 18)))
    assert found["device"] == "4567"
    assert found["number"] == 4
    assert found["kept out"], "this user can enter the office's folder, so nothing was shown"
    assert found["restored"] == [4, 4.0]
    assert found["copied"] == 4
    assert ["theirs", f"at work: {1 << 18}"] in found["records"]
    number = found["work"][0]
    done = ana.sublet("run", "--gpu", "64MiB", "--name", "counted", "--", "sh", "-c", "id -u; exit 3")
    assert (done.returncode, int(done.stdout)) == (3, number), done
    bens = place.ben.sublet("run", "--gpu", "64MiB", "--name", "counted", "--", "id", "-u")
    assert bens.returncode == 0, bens
    shown, listed = ana.commands(["lease", "show", found["lease"]], ["ps", "--all", "--json"])
    assert f"asked by      uid {ANA}, pid " in shown[1], shown
    assert [one["name"] for one in json.loads(listed[1])].count("counted") == 1, "each sees its own"
    if is_roots:
        assert [one for one in found["cells"] if one < 10] == [2, 2]
        assert found["aio"] == number
        assert len({number, int(bens.stdout)}) == 2
        assert min(number, int(bens.stdout)) > 1_000_000
    else:
        assert number == int(bens.stdout) == place.owner.uid, "an ordinary user has no other numbers to give"
    log = (place.home / "office.log").read_text()
    assert f"uid {ANA}, pid " in log
    audited = _audited(place)
    assert any(record["by"].startswith(f"tenant:ana (uid {ANA}, pid ") for record in audited), audited[-5:]


KERNEL: Final = """
import json, os, sys
from jupyter_client import KernelManager

def ran(code):
    said = []
    reply = client.execute_interactive(code, timeout=240, output_hook=said.append)
    assert reply["content"]["status"] == "ok", (code, reply["content"], [one["content"] for one in said])
    return "".join(one["content"].get("text", "") for one in said if one["msg_type"] == "stream")

manager = KernelManager(kernel_name="leasing")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=240)
try:
    found = {"leased": ran("import os; kept = [os.getuid()]; print(kept[0], os.environ['SUBLET_LEASE'])").split()[-2:]}
    found["beside"] = ran("%%cpu\\nimport os; print(os.getuid())").split()[-1]
    ran("%gpu release")
    found["again"] = ran("print(kept[0], os.environ['SUBLET_LEASE'])").split()[-2:]
finally:
    client.stop_channels()
    manager.shutdown_kernel()
print(json.dumps(found))
"""


@pytest.mark.parametrize("place", [ROOTS], indirect=True)
def test_a_leasing_kernel_of_another_user_works(place: Place) -> None:
    """The kernel that `sublet kernelspec` puts into Jupyter's menu: its cells run on a device, as the tenant's number,
    its state is saved when the lease ends and comes back with the next; all by a user with no rights in the office."""
    done = place.ana.sublet("kernelspec", "install", "--user", "--name", "leasing", "--vram", "64MiB")
    assert done.returncode == 0, done
    found = place.ana.program(KERNEL)
    number, lease = found["leased"]
    assert int(number) > 1_000_000, "a cell ran in the holder's process, or as root"
    assert int(found["beside"]) == ANA
    assert found["again"][0] == number
    assert found["again"][1] != lease, "the state came back under another lease"
    with place.owner.acting():
        tenants = {one.id: one.tenant for one in place.fabric.leases(all=True)}
    assert tenants[lease] == tenants[found["again"][1]] == "ana"


def test_who_shows_no_token_gets_nothing(place: Place) -> None:
    """On no route and over no data connection; not even the owner, whose rule belongs to the other socket."""
    asked = (["status"], ["lease", "acquire", "--gpu", "64MiB"], ["run", "--gpu", "64MiB", "--", "id"], ["ps"])
    for status, out, err in place.stranger.commands(*asked):
        assert status != 0, err
        assert out == ""
        assert "there was none (user 64003)" in err
        assert "sublet tenant add" in err
    done = place.ana.sublet("status", SUBLET_TOKEN="")
    assert "must show its access token as well" in done.stderr, done
    with place.owner.acting():
        with sublet.connect(place.url) as owner, pytest.raises(Unauthorized, match="over the shared socket"):
            owner.leases()
        assert not any(one.tenant == "local" for one in place.fabric.leases())


def test_what_is_no_token_of_this_office_opens_nothing(place: Place) -> None:
    wrong = ("sublet_" + "x" * 43, "sublet_", "Bearer", "x" * 4096, "sublet_" + "y" * 4000)
    for token, (status, _, err) in zip(wrong, place.stranger.commands(["status"], tokens=wrong), strict=True):
        assert status == 1, (token, err)
        assert "token" in err


def test_a_token_is_worth_something_only_to_whom_it_is_for(place: Place) -> None:
    """Ana's in the hands of another user, of root, of the owner's own socket; the owner's in the hands of anybody."""
    assert place.ana.token is not None
    owners = place.request("PATCH", "/v1/tenants/local", {"new_token": True}, shape=dict)["token"]
    asked = (["status"], ["--as-tenant", "status"])  # to mean it helps nobody but the owner
    found = place.stranger.commands(*asked, tokens=(place.ana.token, owners))
    assert [status for status, _, _ in found] == [1] * 4
    for anas, the_owners in (found[:2], found[2:]):
        assert "which is user 64001, and this process runs as user 64003" in anas[2]
        assert "of the office's owner" in the_owners[2]
    who = "the owner of the office" if place.owner.uid else "root"
    for how in ({"home": place.home}, {"url": place.url}):
        with place.owner.acting():
            with sublet.connect(token=place.ana.token, **how) as not_meant:  # noqa: SIM117
                with pytest.raises(Unauthorized, match=f"runs as {who}"):
                    not_meant.leases()
            with sublet.connect(token=place.ana.token, as_tenant=True, **how) as meant:
                assert {one.tenant for one in meant.leases(all=True)} <= {"ana"}


MATRIX: Final = """
import json, os, socket, sys, time
from sublet.errors import SubletError
from sublet.values import Epoch, LeaseId
from sublet.wire.codec import dumps
from sublet.wire.conversation import Conversation
from sublet.wire import guests as g, volumes as v, zygote as z
from sublet.wire.device import *  # noqa
asked = json.loads(sys.argv[1])
base = os.path.dirname(os.environ["SUBLET_URL"].removeprefix("unix://"))
token = os.environ.get("SUBLET_TOKEN", "")

def http(method, path, body):
    raw = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\ncontent-length: {len(raw)}\\r\\n"
    head += f"authorization: Bearer {token}\\r\\n" if token else ""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(120)
        sock.connect(base + "/office.sock")
        sock.sendall(head.encode() + b"\\r\\n" + raw)
        data = b""
        while piece := sock.recv(65536):
            data += piece
    head, _, body = data.partition(b"\\r\\n\\r\\n")
    return int(head.split()[1]), body.decode()

found = {"routes": {}, "data": {}}
for name, method, path, body in asked["routes"]:
    found["routes"][name] = http(method, path, body)
lease, epoch, guest = LeaseId(asked["lease"]), Epoch(*asked["epoch"]), asked["guest"]
calls = [
    g.Attach(guest=guest), g.Attach(guest=guest, stdin=True), g.Connect(guest=guest, service=g.Service.WORK),
    g.Connect(guest=guest, service=g.Service.DEVICE), g.Connect(guest=guest, service=g.Service.JUPYTER),
    g.Resize(guest=guest, rows=1, cols=1), g.SignalGuest(guest=guest, number=9), g.EndGuest(guest=guest, grace_ns=0),
    g.Start(spec=g.GuestSpec(argv=("/bin/true",))), v.LendVolume(), v.OpenVolume(lease=lease, epoch=epoch),
    v.Publish(lease=lease, epoch=epoch, staging="x", manifest="m"), v.Collect(lease=lease, epoch=epoch, keep=1),
    v.CopyIn(lease=lease, epoch=epoch, volume="0" * 32), v.ListVolume(lease=lease, epoch=epoch),
    v.OpenFiles(lease=lease, epoch=epoch, names=("0000000000000001.manifest",)),
]
for how, greeting in (
    ("own", g.Greeting(access=token)), ("stolen", g.Greeting(capability=asked["capability"])),
    ("meant", g.Greeting(capability=asked["capability"], as_tenant=True)),
    ("both", g.Greeting(capability=asked["capability"], access=token or "sublet_x")), ("none", g.Greeting()),
):
    try:
        talk = Conversation.connect(base + "/data.sock", dumps(greeting), named=True)
    except SubletError as error:
        found["data"][how] = error.kind
        continue
    said = []
    for call in calls:
        try:
            talk.call(dumps(call))
            said.append(f"{call}: answered")
        except SubletError as error:
            said.append(error.kind)
            if talk.link.over is not None:
                talk.close()
                talk = Conversation.connect(base + "/data.sock", dumps(greeting), named=True)
    listed = json.loads(talk.call(dumps(g.ListGuests(ended=True))).body)["guests"]
    found["data"][how] = {"said": said, "guests": [one["id"] for one in listed]}
    talk.close()

found["events"] = {}
for query in ("", "?all=1", "?lease=" + lease):  # beside it the other tenant's leases begin and end all the time
    head = f"GET /v1/events{query} HTTP/1.1\\r\\nhost: x\\r\\nauthorization: Bearer {token}\\r\\n\\r\\n"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(120)
        sock.connect(base + "/office.sock")
        sock.sendall(head.encode())
        heard, own = sock.recv(65536).decode(), ""
        if heard.split()[1] == "200":
            begun = os.stat(asked["begun"]).st_size
            while os.stat(asked["begun"]).st_size < begun + 2:
                time.sleep(0.01)
            body = {"request_id": os.urandom(8).hex(), "ttl": 60, "wants": [{"kind": "memory", "amount": 1 << 26}]}
            own = json.loads(http("POST", "/v1/leases", body)[1])["lease"]["id"]
            http("POST", f"/v1/leases/{own}/release", {})
            while not any(own in piece and '"ended"' in piece for piece in heard.split("\\n\\n")):
                heard += sock.recv(65536).decode()
        found["events"][query] = {"heard": heard, "own": own}
print(json.dumps(found))
"""


NAMES_NOBODY: Final = {
    "Detach": "it ends what was attached over the same connection",
    "Warm": "it names an interpreter, and no lease or guest",
}
"""Data calls that cannot be about something of another tenant's."""


def test_every_data_call_is_in_the_matrix() -> None:
    tried = {call.__name__ for call in get_args(HolderCall) if re.search(rf"\b[gv]\.{call.__name__}\(", MATRIX)}
    assert tried | NAMES_NOBODY.keys() == {call.__name__ for call in get_args(HolderCall)}


def test_no_route_and_no_data_call_leads_to_another_tenant(place: Place) -> None:
    """Ben's lease, its guest, its volume and its tokens, asked for by ana and by a user without a token, over every
    route and with every call."""
    with sublet.connect(place.url, token=_token(place, "ben"), as_tenant=True) as bens:  # noqa: SIM117
        with (
            bens.gpu(min_vram="64MiB") as lease,
            bens.block("64MiB", name="bens") as block,
            lease.start(["sleep", "600"], cwd="/") as guest,
        ):
            view = bens.request("GET", f"/v1/leases/{lease.id}/token", shape=dict)
            never = "l-0123456789abcdef"
            names: dict[str, dict[str, list[Any]]] = {"theirs": {}, "never": {}}
            for which, of in (("theirs", lease.id), ("never", never)):
                for route in ROUTES:
                    if route.right is Right.OPEN or route.path == "/v1/events":  # a stream, which is listened to below
                        continue
                    named = {"volume": "bens", "tenant": "ben", "node": "local"}.get(route.of, of)
                    named = named if which == "theirs" or route.of == "lease" else "neverwas"
                    names[which][f"{route.method} {route.path}"] = [
                        route.method, route.path.replace("{id}", named), example(route)
                    ]  # fmt: skip
            asked = {
                "lease": block.id,
                "begun": str(place.ben.folder / "begun"),
                "epoch": list(block.epoch),
                "guest": guest.id,
                "capability": view["token"],
                "routes": [[f"{which} {name}", *one] for which, some in names.items() for name, one in some.items()],
            }
            before = _audited(place)
            with _busy(bens, Path(asked["begun"])) as bens_leases, ThreadPoolExecutor(2) as pool:
                anas, nobodys = pool.map(
                    lambda user: user.program(MATRIX, json.dumps(asked)), (place.ana, place.stranger)
                )
            for query, told in nobodys["events"].items():
                assert told["heard"].split()[1] == "401", query
            for query, told in anas["events"].items():
                if told["own"]:
                    others = set(re.findall(r"\bl-[0-9a-f]{16}\b", told["heard"])) - {told["own"]}
                    assert not others, f"/v1/events{query} tells of {others}"
                    assert '"ben"' not in told["heard"]
                assert told["own"] or "lease=" in query, f"/v1/events{query}: {told}"
            assert anas["events"][f"?lease={block.id}"]["heard"].split()[1] == "404"
            for name, (status, _) in nobodys["routes"].items():
                assert status == 401, f"{name}: {status}"
            assert set(nobodys["data"].values()) == {"Unauthorized"}, nobodys["data"]
            for route in ROUTES:
                name = f"{route.method} {route.path}"
                if f"theirs {name}" not in anas["routes"]:
                    continue
                status, body = anas["routes"][f"theirs {name}"]
                if route.right is Right.OPERATOR:
                    assert status == 401, f"{name}: {status} {body}"
                elif route.of in ("lease", "volume"):
                    other, unknown = anas["routes"][f"never {name}"]
                    plain = unknown.replace(never, "ID").replace("neverwas", "ID")
                    assert (status, body.replace(lease.id, "ID").replace("bens", "ID")) == (other, plain), name
                    assert status == 404, f"{name}: {status} {body}"
                for secret in (lease.id, block.id, guest.id, '"bens"'):
                    assert secret not in body or route.of, f"{name} tells of {secret}: {body}"
            for how in ("stolen", "meant", "both", "none"):
                assert anas["data"][how] == "Unauthorized", anas["data"]
            assert not [said for said in anas["data"]["own"]["said"] if "answered" in said], anas["data"]["own"]
            assert guest.id not in anas["data"]["own"]["guests"]
            assert guest.exit_code is None, "it was ended by another tenant"
            assert [
                one
                for one in _audited(place)[len(before) :]
                if "ben" in json.dumps(one) and not any(lease in json.dumps(one) for lease in bens_leases)
            ] == []


@contextlib.contextmanager
def _busy(fabric: sublet.Fabric, begun: Path) -> Iterator[list[str]]:
    """Leases of this tenant begin and end meanwhile; which. The file has a byte for each that has begun, so that who
    listens can wait until there was something to hear of."""
    over, found = threading.Event(), list[str]()
    begun.touch()

    def work() -> None:
        while not over.is_set():
            with fabric.memory("64MiB") as lease:
                found.append(lease.id)
                with begun.open("a") as file:
                    file.write(".")
            over.wait(0.1)  # an hour's leases are not used up, however long who listens takes

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _token(place: Place, tenant: str) -> str:
    answer = place.request("PATCH", f"/v1/tenants/{tenant}", {"new_token": True}, shape=dict)
    return str(answer["token"])


def _audited(place: Place) -> list[Any]:
    found: list[Any] = place.request("GET", "/v1/audit", shape=list)
    return found


KEEPER: Final = """
import json, os, socket, sys, time
import sublet
from sublet.wire import guests as g
from sublet.wire.codec import dumps
from sublet.wire.conversation import Conversation
base, token = os.path.dirname(os.environ["SUBLET_URL"].removeprefix("unix://")), os.environ.get("SUBLET_TOKEN", "")

def head(method, path, size=0):
    shown = f"authorization: Bearer {token}\\r\\n" if token else ""
    return f"{method} {path} HTTP/1.1\\r\\nhost: x\\r\\n{shown}content-length: {size}\\r\\n\\r\\n".encode()

def line(first, heard=b""):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(120)
    sock.connect(base + "/office.sock")
    sock.sendall(first)
    data = b""
    while heard not in data:
        data += sock.recv(65536)
    return sock

def ways(wait):  # open connections, and what is still to be sent over each
    asked = {"request_id": os.urandom(8).hex(), "ttl": 60, "wants": [{"kind": "memory", "amount": 1 << 26}]}
    body = json.dumps(asked).encode()
    return {
        "idle": (line(head("GET", "/v1/budgets"), b"[]"), head("GET", "/v1/leases")),
        "half": (line(head("POST", "/v1/leases", len(body)) + body[:9]), body[9:]),
        "poll": (line(head("GET", f"/v1/leases/{lease.id}?wait={wait}&after=active")), b""),
    }

fabric = sublet.connect()
lease = fabric.gpu(min_vram="64MiB", ttl="10m")
device = sublet.GpuSession(lease)
memory = device.mem_alloc(16)
device.mem_write(memory, 0, b"0123456789abcdef")
talk = Conversation.connect(base + "/data.sock", dumps(g.Greeting(access=token)), named=True)
talk.call(dumps(g.ListGuests(ended=True)))
kept = [ways(0.1), {**ways(60), "news": (line(head("GET", "/v1/events"), b": news"), b"")}]
with socket.socket(socket.AF_UNIX) as out:
    out.connect(sys.argv[1])
    rest = json.dumps([{name: text.hex() for name, (_, text) in some.items()} for some in kept])
    socket.send_fds(out, [rest.encode()], [sock.fileno() for some in kept for sock, _ in some.values()])
print(json.dumps(lease.id), flush=True)
sys.stdin.readline()
found, limit_s = {}, time.monotonic() + 60
for name, use in (
    ("device", lambda: device.mem_read(memory, 0, 4)),
    ("data", lambda: talk.call(dumps(g.ListGuests(ended=True)), timeout_s=60)),
    ("command", lambda: lease.start(["true"], cwd="/")),
):
    while name not in found and time.monotonic() < limit_s:  # in the background, at once
        try:
            use()
        except sublet.SubletError as error:
            found[name] = type(error).__name__
print(json.dumps(found), flush=True)
os._exit(0)
"""
RECEIVER: Final = """
import json, os, socket, sys

def told(fd, rest):
    sock = socket.socket(fileno=fd)
    sock.settimeout(90)
    data = b""
    try:
        sock.sendall(bytes.fromhex(rest))
        while b"content-length" not in data and not data.endswith(b"\\r\\n0\\r\\n\\r\\n"):  # whole, or a stream's end
            piece = sock.recv(65536)
            if not piece:
                break
            data += piece
    except OSError as error:
        return f"{type(error).__name__}: {data.decode()}"
    return data.decode()

with socket.socket(socket.AF_UNIX) as door:
    door.bind(sys.argv[1])
    os.chmod(sys.argv[1], 0o777)
    door.listen()
    print(json.dumps("listens"), flush=True)
    said, fds, _, _ = socket.recv_fds(door.accept()[0], 1 << 16, 16)
for some in json.loads(said):
    sys.stdin.readline()
    print(json.dumps({name: told(fds.pop(0), rest) for name, rest in some.items()}), flush=True)
"""


def _goes_on(program: subprocess.Popen[str], said: str = "") -> None:
    assert program.stdin is not None
    program.stdin.write(f"{said}\n")
    program.stdin.flush()


def _said(program: subprocess.Popen[str]) -> Any:
    assert program.stdout is not None
    return json.loads(program.stdout.readline())


@pytest.mark.parametrize("place", [ORDINARY], indirect=True)
@pytest.mark.parametrize("tenant", ["kim", "lee"])
def test_a_connection_that_was_kept_is_worth_nothing_when_the_rights_are_gone(place: Place, tenant: str) -> None:
    """Kim's token is replaced; lee, a user who needed none, needs one. Opened before, and in a program of another user:
    an idle connection, a request whose second half comes now, one that waits for an answer, a stream of news; and the
    tenant's own data connection and device session. Before, each of them works."""
    body: dict[str, Any] = {"id": tenant, **({"uid": LEE, "needs_token": False} if tenant == "lee" else {})}
    token = place.request("POST", "/v1/tenants", body, shape=dict)["token"]
    keeper = User(LEE, place.stranger.folder.parent / tenant, place.url, None if tenant == "lee" else token)
    door = f"{place.stranger.folder}/{tenant}.sock"
    with place.stranger.running(RECEIVER, door) as receiver:
        assert _said(receiver) == "listens"
        with keeper.running(KEEPER, door) as program:
            lease = _said(program)
            _goes_on(receiver)
            before = {name: text.split()[1] for name, text in _said(receiver).items()}
            assert before == {"idle": "200", "half": "201", "poll": "200"}
            leases = _leases_of(place, tenant)
            change = {"needs_token": True} if tenant == "lee" else {"new_token": True}
            place.request("PATCH", f"/v1/tenants/{tenant}", change, shape=dict)
            [other] = leases - {lease}
            place.request("POST", f"/v1/leases/{other}/revoke", {}, shape=dict)
            _goes_on(receiver)
            after = _said(receiver)
            news = after.pop("news")
            assert news.endswith("\r\n0\r\n\r\n"), "the stream has ended"
            assert other in news
            assert "ending" not in news, "it told of what happened afterwards"
            assert {name: text.split()[1] for name, text in after.items()} == dict.fromkeys(before, "401"), after
            assert not [text for text in after.values() if lease in text]
            assert _leases_of(place, tenant) <= leases
            _goes_on(program)
            found = _said(program)
    assert found.keys() == {"device", "data", "command"}, "some connection was never cut"


def _leases_of(place: Place, tenant: str) -> set[str]:
    return {one["id"] for one in place.request("GET", f"/v1/leases?tenant={tenant}", shape=list)}


STUDIO: Final = "import sys; from sublet.cli import main; main(['studio', '--socket', sys.argv[1]])"
HAS_TOKENS: Final = """
import json, os, sys
import sublet
with sublet.connect() as fabric, fabric.cpu(1, ttl="10m") as lease:
    guest = lease.start(["sleep", "600"], cwd="/")
    lease.run(os.getpid)
    capability = fabric.request("GET", f"/v1/leases/{lease.id}/token", shape=dict)["token"]
    own = open("/proc/self/environ").read()
    assert os.environ["SUBLET_TOKEN"] in own and os.environ["SUBLET_STUDIO_TOKEN"] in own
    print(json.dumps([os.getpid(), capability]), flush=True)
    sys.stdin.readline()
"""
LOOKS: Final = """
import collections, ctypes, json, os, sys
secrets = [one.encode() for one in json.loads(sys.stdin.readline())]
libc, found, got = ctypes.CDLL(None), [], collections.Counter()

def read(path):
    with open(path, "rb", buffering=0) as file:
        data = file.read(1 << 20)
    got[os.path.basename(path)] += bool(data)  # of a thread of the kernel's there is nothing to read
    found.extend(path for one in secrets if one in data)

def tried(what, *given):
    try:
        return what(*given)
    except OSError:
        return ()

for pid in filter(str.isdigit, os.listdir("/proc")):
    base = f"/proc/{pid}"
    if tried(lambda: os.stat(base).st_uid) in ((), os.getuid()):
        continue
    for name in ("cmdline", "environ", "mem", "maps", "auxv", "status", "mountinfo", f"task/{pid}/environ"):
        tried(read, f"{base}/{name}")
    for folder in ("fd", "map_files"):
        for name in tried(os.listdir, f"{base}/{folder}"):
            got[folder] += 1
            tried(read, f"{base}/{folder}/{name}")
    handle = tried(os.pidfd_open, int(pid))
    if handle != ():
        got["pidfd"] += 1
        got["taken"] += sum(libc.syscall(438, handle, number, 0) >= 0 for number in range(32))  # pidfd_getfd
        os.close(handle)
print(json.dumps([sorted(set(found)), got]), flush=True)
sys.stdin.readline()
"""


UNREADABLE: Final = ("environ", "mem", "maps", "auxv", "fd", "map_files", "taken")


def test_no_other_user_finds_a_token_in_proc(place: Place) -> None:
    """Of a person's program, its guests, the office and the studio: nothing that another user may read of them has an
    access token, a person's token, a capability token or the studio's right in it; and what they have open cannot be
    taken. The person's own environment shows two of them, so they are there to be found."""
    env = {"SUBLET_HOME": str(place.home)}
    person = place.owner.sublet("person", "add", "ana", "--tenant", "ana", **env).stdout.strip()
    assert place.ana.token is not None
    assert person.startswith(TOKEN_PREFIX)
    socket_path = f"{place.owner.folder}/studio.sock"
    with place.owner.running(STUDIO, socket_path, **env) as studio:
        until("the studio", lambda: os.path.exists(socket_path) and (place.home / "studio" / "office-token").exists())
        with place.ana.running(HAS_TOKENS, SUBLET_STUDIO_TOKEN=person) as program:
            pid, capability = _said(program)
            secrets = [place.ana.token, person, capability, (place.home / "studio" / "office-token").read_text()]
            for user in (place.ben, place.stranger):
                with user.running(LOOKS) as looks:
                    _goes_on(looks, json.dumps(secrets))
                    found, got = _said(looks)
                assert found == [], f"user {user.uid} reads {found}"
                assert got["cmdline"] > 3, "it sees other processes"
                assert not sum(got.get(name, 0) for name in UNREADABLE), got
            environ = Path(f"/proc/{pid}/environ").read_text()
            assert place.ana.token in environ, "root would have found it there"
        assert studio.poll() is None


def test_an_office_that_was_killed_comes_back_with_its_shared_sockets(place: Place) -> None:
    """Whoever starts it: what `up` was told is remembered."""
    with place.owner.acting():
        pid = place.fabric.status().pid
    os.kill(pid, signal.SIGKILL)
    until("the office ends", lambda: not Path(f"/proc/{pid}/stat").exists() or "Z" in _state(pid))
    assert "did not answer" in place.ana.sublet("status").stderr
    place.owner.up()
    done = place.ana.sublet("status", "--json")
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["pid"] != pid
    assert place.ben.sublet("run", "--cpu", "1", "--", "true").returncode == 0, "the data socket is there too"
    settings = (place.home / "started-with").read_text()
    assert str(place.shared) in settings


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"
