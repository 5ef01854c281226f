"""The dashboard in a real browser, in front of a real cluster with a real training on it.

Two slots and a standby; every test leaves the training running.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import PATIENCE_MS, Visitor, visitor
from fault_stack import FaultStack
from playwright.sync_api import Browser, Locator, expect

from gemini_ft.contracts.api import JobModel, JobPhase, Role
from gemini_ft.contracts.messages import JobSpec
from gemini_ft.localstack.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_ddp.py"
PATIENCE_S = 60.0


class Cluster:
    """The stack, its one job, and the way into the dashboard."""

    def __init__(self, stack: FaultStack, job_id: str) -> None:
        self.stack = stack
        self.job_id = job_id
        self.token = stack.api_token_file.read_text().strip()

    @property
    def job(self) -> JobModel:
        with self.stack.client() as api:
            return api.job(self.job_id)

    def node_ids(self) -> dict[str, str]:
        with self.stack.client() as api:
            return {node.labels["local-node"]: node.node_id for node in api.nodes()}

    def wait_running(self, generation: int = 1) -> None:
        def runs() -> bool:
            job = self.job
            return job.phase is JobPhase.RUNNING and job.generation >= generation and job.committed_step is not None

        wait_until(runs, f"the job to run in generation {generation} or a later one", PATIENCE_S)


@pytest.fixture(scope="module")
def cluster(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    env = {"OMP_NUM_THREADS": "1"}
    with FaultStack(tmp_path_factory.mktemp("stack"), num_nodes=3, dashboard=True, env=env) as stack:
        command = (str(EXAMPLE), "--steps", "1000000", "--pace", "0.2", "--batch", "1")
        with stack.client() as api:
            job = api.create_job(
                JobSpec(name="training", command=command, num_nodes=2, num_ranks_per_node=1, num_standbys=1)
            )
        found = Cluster(stack, job.job_id)
        found.wait_running()
        yield found


@pytest.fixture
def guest(cluster: Cluster, browser: Browser) -> Iterator[Visitor]:
    """Somebody who has not logged in."""
    with visitor(browser, cluster.stack.dashboard_url) as found:
        yield found


@pytest.fixture
def operator(cluster: Cluster, guest: Visitor) -> Visitor:
    """Somebody who has logged in with an operator's token."""
    cluster.wait_running()
    guest.log_in(cluster.token)
    return guest


def in_words(visitor: Visitor, name: str) -> Locator:
    return visitor.panel("All nodes").get_by_role("row").filter(has=visitor.page.get_by_role("button", name=name))


def test_only_a_token_that_the_api_takes_lets_in(guest: Visitor, cluster: Cluster) -> None:
    page = guest.page
    for path in ("/", f"/jobs/{cluster.job_id}", "/recoveries", "/events", "/simulator"):
        guest.go(path)
        expect(page).to_have_url(f"{guest.url}/login")
    page.get_by_label("Token of the coordinator's API").fill("gft_wrong")
    page.keyboard.press("Enter")
    guest.sees(page.get_by_role("alert"), "the bearer token is wrong, expired or revoked")
    guest.keep("login")
    guest.log_in(cluster.token)
    (cookie,) = page.context.cookies()
    assert cluster.token not in cookie["value"]
    assert cluster.token not in page.content()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    before = cookie["value"]
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_url(f"{guest.url}/login")
    page.context.add_cookies([{"name": cookie["name"], "value": before, "url": guest.url}])
    guest.go("/events")
    expect(page).to_have_url(f"{guest.url}/login")


def test_a_form_of_another_site_is_refused(guest: Visitor, cluster: Cluster) -> None:
    for path, form in (("/login", {"token": cluster.token}), ("/logout", {})):
        answer = guest.page.request.post(f"{guest.url}{path}", form=form, headers={"Origin": "http://elsewhere.test"})
        assert answer.status == 403
    guest.go("/")
    expect(guest.page).to_have_url(f"{guest.url}/login")


def test_the_cluster_page_shows_who_holds_whose_replicas(operator: Visitor, cluster: Cluster) -> None:
    page, ids = operator.page, cluster.node_ids()
    nodes = page.locator(".cluster-map .node")
    expect(nodes).to_have_count(3)
    here, there = (cluster.job.slots[slot] for slot in (0, 1))
    page.locator(f'.node[data-node="{here}"]').click()
    details = operator.panel("Details")
    operator.sees(details, "Who holds whose replicas")
    expect(page.locator(f'.arc.keeps-mine[data-from="{here}"][data-to="{there}"]')).to_have_count(1)
    expect(page.locator(f'.arc.keeps-theirs[data-from="{there}"][data-to="{here}"]')).to_have_count(1)
    operator.keep("cluster")
    details.get_by_role("button", name="Rank 0").click()
    operator.sees(details, "Who holds rank 0 of version")
    expect(page.locator(".arc")).to_have_count(1)
    standby = next(name for name, node_id in ids.items() if node_id not in (here, there))
    page.get_by_label("Find nodes").fill("standby")
    expect(operator.panel("All nodes").locator("tbody tr")).to_have_count(1)
    in_words(operator, standby).get_by_role("button").click()
    operator.sees(details, "It keeps no shards")


def test_a_killed_rank_is_seen_on_every_page(operator: Visitor, cluster: Cluster) -> None:
    page, generation = operator.page, cluster.job.generation
    operator.go(f"/jobs/{cluster.job_id}")
    operator.sees(operator.panel("State"), f"running, generation {generation}")
    cluster.stack.kill_rank(cluster.job_id, 1)
    operator.sees(operator.panel("State"), f"running, generation {generation + 1}")
    operator.sees(operator.panel("Where its time went"), "recovering")
    operator.sees(operator.panel("Recoveries"), "ended by signal 9")
    operator.sees(operator.panel("Ranks").get_by_role("row", name="rank 1"), "running")
    cluster.wait_running(generation + 1)
    operator.sees(operator.panel("Versions"), "Who holds version")
    operator.sees(operator.panel("State"), "steps/s")
    operator.keep("job")

    operator.go(f"/recoveries?job={cluster.job_id}")
    waterfall = operator.panel(f"Generation {generation + 1}")
    operator.sees(waterfall, "completed")
    operator.sees(waterfall, "ended by signal 9")
    phases = waterfall.get_by_role("table").first.locator("tbody th")
    assert phases.all_inner_texts()[:2] == ["detect", "fence"]
    assert waterfall.locator(".strip i").count() == phases.count()
    operator.sees(waterfall.get_by_role("table").nth(1), "rank 1")
    operator.keep("recoveries")

    operator.go("/events")
    operator.sees(operator.panel("What happened, newest first"), "generation_assigned")
    page.get_by_label("Text in the event").fill("signal 9")
    events = operator.panel("What happened, newest first").locator("tbody tr")
    expect(events.first).to_contain_text(f"generation {generation + 1} begins")
    operator.keep("events")


def test_events_come_while_one_looks(operator: Visitor, cluster: Cluster) -> None:
    operator.go("/events")
    rows = operator.panel("What happened, newest first").locator("tbody tr")
    operator.sees(rows.first, cluster.job_id)
    name = next(iter(cluster.node_ids().values()))
    with cluster.stack.client() as api:
        api.relabel_node(name, {"seen": "yes"})
    operator.sees(rows.first, "relabel {'seen': 'yes'}")


def test_what_a_rank_writes_is_followed(operator: Visitor, cluster: Cluster) -> None:
    operator.go(f"/jobs/{cluster.job_id}")
    operator.panel("Ranks").get_by_role("button", name="rank 0").click()
    log = operator.page.get_by_role("log")
    expect(log).to_contain_text(re.compile(r"step \d+ loss \d"), timeout=PATIENCE_MS)
    newest = max(int(step) for step in re.findall(r"step (\d+) loss", log.inner_text()))
    operator.sees(log, f"step {newest + 3} loss")


def test_a_job_is_stopped_and_resumed_from_its_page(operator: Visitor, cluster: Cluster) -> None:
    page = operator.page
    operator.go(f"/jobs/{cluster.job_id}")
    state = operator.panel("State")
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("alertdialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("alertdialog")).to_have_count(0)
    assert cluster.job.phase is JobPhase.RUNNING

    operator.confirm(page.get_by_role("button", name="Checkpoint now"), "Checkpoint now")
    operator.sees(page.locator(".q-notification").first, "Checkpoint now: done, or under way")

    # Somebody else is faster: what is refused is told in the API's own words.
    page.get_by_role("button", name="Stop", exact=True).click()
    with cluster.stack.client() as api:
        api.stop_job(cluster.job_id)
        wait_until(lambda: api.job(cluster.job_id).phase is JobPhase.SUSPENDED, "the job to be suspended", PATIENCE_S)
    page.get_by_role("alertdialog").get_by_role("button", name="Stop", exact=True).click()
    operator.sees(page.locator(".q-notification.bg-negative"), "is suspended already; resume it")
    operator.sees(state, "suspended, generation")
    operator.keep("job-suspended")

    operator.confirm(page.get_by_role("button", name="Resume"), "Resume")
    operator.sees(state, "running, generation")
    operator.sees(operator.panel("Where its time went"), "suspended")


def test_a_node_is_drained_from_the_jobs_page(operator: Visitor, cluster: Cluster) -> None:
    names = {node_id: name for name, node_id in cluster.node_ids().items()}
    before = cluster.job
    drained = names[before.slots[1]]
    operator.go(f"/jobs/{cluster.job_id}")
    nodes = operator.panel("Nodes")
    operator.confirm(nodes.get_by_role("button", name=f"Drain {drained}"), "Drain")
    operator.sees(operator.panel("Recoveries"), f"drain of {before.slots[1]}")
    operator.sees(operator.panel("State"), f"running, generation {before.generation + 1}")
    operator.go(f"/?node={before.slots[1]}")
    details = operator.panel("Details")
    operator.sees(details, f"{drained}: cordoned")
    operator.keep("cluster-cordoned")
    operator.confirm(details.get_by_role("button", name="Uncordon"), "Uncordon")
    operator.sees(details, f"{drained}: standby")


def test_viewers_change_nothing_and_a_revoked_token_leads_back_to_the_login(guest: Visitor, cluster: Cluster) -> None:
    cluster.wait_running()
    with cluster.stack.client() as api:
        made = api.create_token("looks on", Role.VIEWER)
    assert made.token is not None
    guest.log_in(made.token)
    guest.go(f"/?node={cluster.job.slots[0]}")
    guest.sees(guest.panel("Details"), "Who holds whose replicas")
    expect(guest.panel("Details").get_by_role("button", name="Drain")).to_have_count(0)
    guest.go(f"/jobs/{cluster.job_id}")
    guest.sees(guest.panel("State"), "running")
    guest.sees(guest.panel("Nodes"), "slot 0")
    for label in ("Stop", "Checkpoint now", "Drain"):
        expect(guest.page.get_by_role("button", name=label)).to_have_count(0)
    with cluster.stack.client() as api:
        api.revoke_token(made.token_id)
    expect(guest.page).to_have_url(f"{guest.url}/login?refused=true", timeout=PATIENCE_MS)
    guest.sees(guest.page.get_by_role("alert"), "The API does not take the token any more")


def test_a_coordinator_that_is_killed_makes_data_old_and_new_again(operator: Visitor, cluster: Cluster) -> None:
    page = operator.page
    operator.go(f"/jobs/{cluster.job_id}")
    operator.sees(operator.panel("State"), "running")
    notice = page.locator(".stale .notice")
    expect(notice).to_be_hidden()
    cluster.stack.kill_control_plane()
    expect(notice).to_contain_text(
        re.compile(r"Data are \d+ s old: the API at .* cannot be reached"), timeout=PATIENCE_MS
    )
    operator.sees(operator.panel("State"), "running")
    operator.keep("job-stale")
    operator.confirm(page.get_by_role("button", name="Checkpoint now"), "Checkpoint now")
    operator.sees(page.locator(".q-notification.bg-negative"), "cannot be reached")
    page.locator(".q-notification").get_by_role("button", name="Close").click()
    cluster.stack.start_control_plane()
    expect(notice).to_be_hidden(timeout=PATIENCE_MS)
    newest = cluster.job.finished_step or 0
    finished = "Number(document.querySelector('section[aria-label=State] dd').innerText)"
    page.wait_for_function(f"than => {finished} > than", arg=newest)


def test_dark_is_chosen_once_for_all_pages(operator: Visitor, cluster: Cluster) -> None:
    page = operator.page
    background = "getComputedStyle(document.body).backgroundColor"
    page.get_by_role("combobox", name="Theme").click()
    page.get_by_role("option", name="dark").click()
    page.wait_for_function(f'{background} === "rgb(18, 22, 28)"')
    text_of_buttons = "getComputedStyle(document.querySelector('.q-btn')).color"
    assert page.evaluate(text_of_buttons) == "rgb(125, 180, 240)", "light text on dark"
    operator.go(f"/jobs/{cluster.job_id}")
    operator.sees(operator.panel("State"), "steps/s")
    page.wait_for_function(f'{background} === "rgb(18, 22, 28)"')
    operator.keep("job-dark")
    operator.go("/")
    expect(page.locator(".node")).to_have_count(3)
    operator.keep("cluster-dark")
    page.get_by_role("combobox", name="Theme").click()
    page.get_by_role("option", name="light").click()
    page.wait_for_function(f'{background} === "rgb(246, 247, 249)"')
    assert page.evaluate(text_of_buttons) == "rgb(31, 95, 168)", "dark text on light"


def test_the_keyboard_reaches_everything(guest: Visitor, cluster: Cluster) -> None:
    page = guest.page
    guest.go("/login")
    expect(page.get_by_label("Token of the coordinator's API")).to_be_focused()
    page.keyboard.type(cluster.token)
    page.keyboard.press("Enter")
    expect(page.locator(".node")).to_have_count(3)

    def focused() -> str:
        return str(page.evaluate("(document.activeElement.ariaLabel || document.activeElement.innerText || '').trim()"))

    reached = []
    while not page.evaluate("document.activeElement.classList.contains('node')") and len(reached) < 20:
        page.keyboard.press("Tab")
        reached.append(focused())
        if len(reached) == 6:
            expect(page.get_by_role("combobox", name="Theme")).to_be_focused()
    assert reached[:5] == ["Skip to the page's content", "Cluster", "Recoveries", "Events", "Simulator"]
    assert reached[6] == "Log out"
    assert len(reached) == 8, "all nodes together are one stop"
    first = page.evaluate("document.activeElement.dataset.node")
    page.keyboard.press("ArrowRight")
    second = page.evaluate("document.activeElement.dataset.node")
    assert second != first
    page.keyboard.press("Enter")
    guest.sees(guest.panel("Details"), second)
    expect(page.locator(f'.node[data-node="{second}"]')).to_have_attribute("aria-pressed", "true")
    expect(page.locator(f'.node[data-node="{second}"]')).to_be_focused()
    for _ in range(20):
        page.keyboard.press("Tab")
        if focused() == "Cordon":
            break
    page.keyboard.press("Enter")
    dialog = page.get_by_role("alertdialog")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert cluster.job.phase is JobPhase.RUNNING
    links = page.get_by_role("link", name="training")
    links.first.focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{guest.url}/jobs/{cluster.job_id}")


def test_what_is_seen_is_told_in_words_as_well(operator: Visitor, cluster: Cluster) -> None:
    page = operator.page
    expect(page.locator(".node")).to_have_count(3)
    labels = page.locator(".node").evaluate_all("nodes => nodes.map(node => node.getAttribute('aria-label'))")
    assert sorted(label.split(", ")[1] for label in labels) == ["in a job", "in a job", "standby"]
    assert (
        len({shape for shape in page.locator(".node path").evaluate_all("all => all.map(p => p.getAttribute('d'))")})
        == 2
    )
    for path in ("/", f"/jobs/{cluster.job_id}", f"/recoveries?job={cluster.job_id}", "/events", "/simulator"):
        operator.go(path)
        expect(page.get_by_role("heading", level=1)).to_have_count(1)
        unnamed = page.evaluate(
            "[...document.querySelectorAll('button, a, input, select, [role=button], [role=img], [role=combobox]')]"
            ".filter(e => e.checkVisibility() && !(e.ariaLabel || e.innerText || e.title || e.labels?.length))"
            ".map(e => e.outerHTML.slice(0, 200))"
        )
        assert unnamed == [], path


def test_presets_are_simulated(operator: Visitor) -> None:
    page = operator.page
    operator.go("/simulator")
    page.get_by_role("combobox", name="preset").click()
    page.get_by_role("option", name="local-demo").click()
    page.get_by_role("spinbutton", name="runs").fill("3")
    page.get_by_role("button", name="Simulate").click()
    operator.sees(page.locator(".page"), "local-demo: 4 machines, 1 days, 3 runs")
    pictures = page.locator("figure img")
    expect(pictures).to_have_count(2)
    assert pictures.evaluate_all("all => all.every(image => image.complete && image.naturalWidth > 100)")
    operator.sees(operator.panel("As numbers"), "Strawman")
    operator.keep("simulator")
