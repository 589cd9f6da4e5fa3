"""Plugin of pytest: `--costs=NAME` counts the CPU seconds of every test and of all the processes that it starts.

A test has its set-up, call and teardown, and its own fixtures in them; fixtures that tests share have an account of their own, so that
the first test that asks is not charged for the others. What a shared process does in the background is charged to the test that runs.
Every worker of pytest-xdist counts for itself (tools/cpu_cost.py says how); the first process merges, writes build/costs/NAME.json,
prints the dearest and holds tests/costly.toml (ratchet.py).
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable

import pytest
from cpu_cost import new_counter
from ratchet import FILE, Ratchet, Verdict, gone
from sources import is_test

SHOWN = 40
PHASES = ("setup", "call", "teardown")
_OUTSIDE = ("rest", "imports, collection and pytest itself", "")
_Account = tuple[str, str, str]
"""Kind (test, fixture or rest), name, and the phase of a test or the scope of a fixture."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("costs")
    group.addoption("--costs", metavar="NAME", help="count CPU seconds per test, write build/costs/NAME.json, hold tests/costly.toml")
    group.addoption("--costs-counter", default="auto", help="auto, cgroup2, cgroup1 or subreaper: what counts (tools/cpu_cost.py)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("costs"):
        config.pluginmanager.register(Costs(config), "moerl-costs")


class Ledger:
    """CPU seconds by account. One account is open at a time; closing it reopens the one before."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.seconds: defaultdict[_Account, float] = defaultdict(float)
        self._read, self._last = read, 0.0
        self._open = [_OUTSIDE]

    def open(self, account: _Account) -> None:
        self.charge()
        self._open.append(account)

    def close(self, account: _Account) -> None:
        self.charge()
        if account in self._open:
            while self._open.pop() != account:
                pass

    def charge(self) -> None:
        now = self._read()
        self.seconds[self._open[-1]] += now - self._last
        self._last = now


class Costs:
    """Hooks of one process: the whole session, or the controller or one worker of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.name = config, config.getoption("costs")
        self.start = time.monotonic()
        self.counter = new_counter(config.getoption("costs_counter"), with_own=True)
        before = time.process_time() if self.counter.kind != "subreaper" else 0.0  # imports before the group was joined
        self.counter.join()
        self.ledger = Ledger(lambda: before + self.counter.seconds())
        self.setups: defaultdict[str, int] = defaultdict(int)
        self.gone: set[str] = set()
        self.workers: list[dict] = []
        self.lost: list[str] = []
        self.verdict = Verdict()

    # what tests cost

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._phase(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._phase(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._phase(item, "teardown"))

    def _phase(self, item: pytest.Item, phase: str) -> Generator[None, object, object]:
        account = ("test", _node_id(item), phase)
        self.ledger.open(account)
        try:
            return (yield)
        finally:
            self.ledger.close(account)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        account = ("fixture", f"{fixturedef.baseid}::{fixturedef.argname}", fixturedef.scope)
        self.setups[account[1]] += 1
        # Finalizers run last to first: its teardown lies between these two.
        fixturedef.addfinalizer(lambda: self.ledger.close(account))
        self.ledger.open(account)
        try:
            return (yield)
        finally:
            self.ledger.close(account)
            fixturedef.addfinalizer(lambda: self.ledger.open(account))

    # which entries of the ratchet are of no test, before any test is deselected

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not (self.config.rootpath / FILE).exists() or any("::" in argument for argument in self.config.args):
            return
        found = {_node_id(item) for item in items}
        files = {name.partition("::")[0] for name in found}
        every = found | {name.partition("[")[0] for name in found}
        self.gone |= {name for name in Ratchet.read(self.config.rootpath).tests if name.partition("::")[0] in files and name not in every}

    # the end

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error: object) -> None:
        output = getattr(node, "workeroutput", {})
        if "costs" in output:
            self.workers.append(output["costs"])
        else:
            self.lost.append(node.gateway.id)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.ledger.charge()
        own = {"seconds": [[*account, spent] for account, spent in self.ledger.seconds.items()]}
        own |= {"setups": dict(self.setups), "gone": sorted(self.gone)}
        self.counter.close()
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["costs"] = own
            return
        # The controller's group or descendants hold those of its workers: what they report is in its rest.
        parts = self.workers or [own]
        self.report = _merged(parts, self.counter.kind, sum(self.ledger.seconds.values()), time.monotonic() - self.start)
        self.verdict = self._judge({name for part in parts for name in part["gone"]})
        file = self.config.rootpath / "build" / "costs" / f"{self.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"failures": self.verdict.failures, **self.report}, indent=1) + "\n")
        if self.verdict.failures and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _judge(self, gone_here: set[str]) -> Verdict:
        root = self.config.rootpath
        if not (root / FILE).exists():
            return Verdict()
        ratchet = Ratchet.read(root)
        verdict = ratchet.judge({name: sum(phases.values()) for name, phases in self.report["tests"].items()})
        per_setup = {name: one["cpu_seconds"] / one["setups"] for name, one in self.report["fixtures"].items() if one["setups"]}
        no_test = {name for name in ratchet.tests if not is_test(name, root)} | gone_here
        return verdict + ratchet.judge(per_setup, "fixtures") + Verdict([gone(name) for name in sorted(no_test)])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if hasattr(self.config, "workeroutput"):
            return
        report = self.report
        write = terminalreporter.write_line
        minutes = f"{report['cpu_seconds'] / 60:.1f} CPU minutes, {report['wall_seconds'] / 60:.1f} minutes of wall time"
        terminalreporter.section(f"CPU seconds ({report['counter']}): {minutes}")
        for line in [*_dearest_tests(report["tests"]), *_dearest_fixtures(report["fixtures"])]:
            write(line)
        for worker in self.lost:
            write(f"worker {worker} ended early: its tests are not among these", yellow=True)
        for line in self.verdict.warnings:
            write(f"warning: {line}", yellow=True)
        for line in self.verdict.failures:
            write(f"error: {line}", red=True)


def _node_id(item: pytest.Item) -> str:
    """Without the group that pytest-xdist's loadgroup puts behind it."""
    name = item.nodeid
    return name[: name.rfind("@")] if name.rfind("@") > name.rfind("]") else name


def _merged(parts: Iterable[dict], counter: str, total: float, wall: float) -> dict:
    tests: dict[str, dict[str, float]] = {}
    fixtures: dict[str, dict] = {}
    for part in parts:
        for kind, name, detail, spent in part["seconds"]:
            if kind == "test":
                phases = tests.setdefault(name, dict.fromkeys(PHASES, 0.0))
                phases[detail] = round(phases[detail] + spent, 3)
            elif kind == "fixture":
                one = fixtures.setdefault(name, {"scope": detail, "cpu_seconds": 0.0, "setups": 0})
                one["cpu_seconds"] = round(one["cpu_seconds"] + spent, 3)
        for name, setups in part["setups"].items():
            fixtures[name]["setups"] += setups
    return {"counter": counter, "cpu_seconds": round(total, 2), "wall_seconds": round(wall, 2), "tests": tests, "fixtures": fixtures}


def _dearest_tests(tests: dict[str, dict[str, float]]) -> Iterable[str]:
    yield f"the {SHOWN} dearest of {len(tests)} tests: sum, set-up, call, teardown"
    for name, phases in sorted(tests.items(), key=lambda item: -sum(item[1].values()))[:SHOWN]:
        yield f"{sum(phases.values()):8.1f} {phases['setup']:7.1f} {phases['call']:7.1f} {phases['teardown']:7.1f}  {name}"


def _dearest_fixtures(fixtures: dict[str, dict]) -> Iterable[str]:
    yield "shared fixtures above 1 CPU second: sum, times set up"
    for name, one in sorted(fixtures.items(), key=lambda item: -item[1]["cpu_seconds"])[:SHOWN]:
        if one["cpu_seconds"] > 1:
            yield f"{one['cpu_seconds']:8.1f} {one['setups']:7d}  {name} ({one['scope']})"
