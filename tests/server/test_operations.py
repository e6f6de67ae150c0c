"""Versions, rollouts and the degrade switch of a running service, over HTTP."""

from __future__ import annotations

import json
import math
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import adaptive_engine, running, speaking_engine

from engines import finish, greedy
from vera.cache import CacheUse
from vera.config import LIVE_SETTINGS, CacheConfig
from vera.engine.audit import AuditResult
from vera.engine.request import FinishReason, Update
from vera.params import ParameterStore, setting_names
from vera.rollout import BreakerSettings, Limits, Override, Plan
from vera.server.operations import Operations, Oversight, make_native

PINNED = frozenset(setting_names()) - LIVE_SETTINGS
"""A tiny engine shapes its memory as it must; versions say the rest."""
PROFILE = "long-document"
ADMIN = {"Authorization": "Bearer admin"}
SIGNED = {"author": "ann", "reason": "a test"}
LONG = list(range(3, 203))
FAST_PLAN = "5:0:1,50:0:1,100:0:1"
OPEN_LIMITS = {"shadow_kl": None, "shadow_agreement": None, "ttft_ratio": None, "itl_ratio": None, "audit_error": None}
OPEN_LIMITS |= {"audit_ratio": None}


@pytest.fixture
def store(tmp_path):
    with ParameterStore(tmp_path / "params.sqlite3") as opened:
        yield opened


def version(store, **changes):
    """A new version of the profile, as its ref."""
    settings = {"mode": "adaptive", "min_context": 64, **changes}
    return store.create(PROFILE, settings, author="ann", reason="a test").ref


def operated(store, load=adaptive_engine, **settings):
    shadow = settings.pop("shadow_share", 0.05)
    breaker = settings.pop("breaker", BreakerSettings(memory_share=None))
    follows = ParameterStore(store.path)  # of its own, as another process has
    oversight = Oversight(follows, settings.pop("profile", PROFILE), pinned=PINNED, shadow_share=shadow, breaker=breaker)
    return running(load, oversight=oversight, admin_key="admin", **settings)


def admin(server, path, body=None, status=200):
    call = (
        server.client.get(f"/admin/{path}", headers=ADMIN) if body is None else server.post(f"/admin/{path}", body, headers=ADMIN)
    )
    assert call.status_code == status, call.text
    return call.json()


def served(server, **fields):
    """The extension of the usage of one short answer."""
    return server.complete(LONG, max_tokens=4, **fields)["usage"]["vera"]


def start_rollout(server, candidate, plan=FAST_PLAN, limits=OPEN_LIMITS, **more):
    return admin(server, "rollout/start", {**SIGNED, "candidate": candidate, "plan": plan, "limits": limits, **more})


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)
    return found


# -- versions ----------------------------------------------------------------------------------------------------------


def test_request_carries_the_version_that_served_it(store):
    ref = version(store, attention_tolerance=0.03)
    with operated(store) as server:
        before = served(server)
        assert admin(server, "params/activate", {**SIGNED, "version": ref}) == {"before": None, "active": ref}
        after = served(server)
    assert (before["params_version"], before["attention_tolerance"]) == (None, 0.015)
    assert (after["params_version"], after["attention_tolerance"]) == (ref, 0.03)


def test_activation_by_another_process_is_followed(store):
    with operated(store) as server:
        ref = version(store, attention_tolerance=0.04)
        store.activate(ref, author="ann", reason="from a command line")
        until(lambda: served(server)["params_version"] == ref)
        assert admin(server, "params")["active"] == ref


def test_settings_of_the_whole_cache_follow_the_version(store):
    ref = version(store, cold_drop_step=128)
    with operated(store) as server:
        admin(server, "params/activate", {**SIGNED, "version": ref})
        assert server.inspect(lambda engine: engine.cache.config.cold_drop_step) == 128
        admin(server, "params/activate", {**SIGNED, "version": version(store)})
        assert server.inspect(lambda engine: engine.cache.config.cold_drop_step) == CacheConfig().cold_drop_step


def test_rollback_goes_to_the_version_before(store):
    first, second = version(store), version(store, attention_tolerance=0.04)
    with operated(store) as server:
        for ref in (first, second):
            admin(server, "params/activate", {**SIGNED, "version": ref})
        assert admin(server, "params/rollback", SIGNED) == {"before": second, "active": first}
        assert served(server)["params_version"] == first


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("params/activate", {**SIGNED, "version": f"{PROFILE}@99"}, 404, "99"),
        ("params/activate", {**SIGNED, "version": "multi-turn@1"}, 409, "no version of long-document"),
        ("params/activate", {"version": f"{PROFILE}@1"}, 400, "author"),
        ("params/activate", {**SIGNED, "version": f"{PROFILE}@1", "force": True}, 400, "force"),
        ("params/activate", {**SIGNED, "author": " ", "version": f"{PROFILE}@1"}, 400, "author"),
        ("params/rollback", SIGNED, 409, "nothing to go back to"),
        ("rollout/start", {**SIGNED, "candidate": f"{PROFILE}@99"}, 404, "99"),
        ("rollout/start", {**SIGNED, "candidate": f"{PROFILE}@1", "plan": "5:x"}, 400, "5:x"),
        ("rollout/start", {**SIGNED, "candidate": f"{PROFILE}@1", "limits": {"speed": 1}}, 400, "speed"),
        ("rollout/abort", SIGNED, 409, "no rollout"),
        ("rollout/delete", SIGNED, 400, "action"),
        ("rollout/abort", {**SIGNED, "full": False}, 400, "promote alone"),
        ("degrade", {**SIGNED, "override": "off"}, 400, "override"),
    ],
)
def test_refusal_names_what_is_wrong_and_changes_nothing(store, path, body, status, told):
    with operated(store) as server:
        head = store.head
        assert told in admin(server, path, body, status)["error"]["message"]
        assert store.head == head
        assert served(server)["params_version"] is None


def test_version_that_needs_a_restart_is_refused(store):
    ref = version(store, sketch_bits=8)
    oversight = Oversight(ParameterStore(store.path), PROFILE, pinned=PINNED - {"sketch_bits"})
    with running(adaptive_engine, oversight=oversight, admin_key="admin") as server:
        assert "sketch_bits" in admin(server, "params/activate", {**SIGNED, "version": ref}, 409)["error"]["message"]
        store.activate(ref, author="ann", reason="behind its back")
        until(lambda: admin(server, "stats")["operations"]["refusal"])
        assert served(server)["params_version"] is None


def test_store_that_is_gone_leaves_the_service_serving(store, tmp_path):
    ref = version(store)
    with operated(store) as server:
        admin(server, "params/activate", {**SIGNED, "version": ref})
        store.path.write_bytes(b"not a database" * 1000)
        time.sleep(1.5)
        assert served(server)["params_version"] == ref
        admin(server, "params/activate", {**SIGNED, "version": ref}, 409)


# -- rollouts ----------------------------------------------------------------------------------------------------------


def test_rollout_from_native_splits_keys_and_keeps_them(store):
    ref = version(store)
    with operated(store) as server:
        start_rollout(server, ref, plan="50:600:1,100:600:1")
        first = {key: served(server, user=key) for key in map(str, range(24))}
        again = {key: served(server, user=key) for key in first}
    arms = {key: (usage["arm"], usage["params_version"], usage["fidelity"]) for key, usage in first.items()}
    assert set(arms.values()) == {("stable", None, "native"), ("candidate", ref, "bounded")}
    assert arms == {key: (usage["arm"], usage["params_version"], usage["fidelity"]) for key, usage in again.items()}


def test_rollout_between_versions_serves_each_arm_with_its_own(store):
    stable, candidate = version(store, attention_tolerance=0.02), version(store, attention_tolerance=0.05)
    with operated(store) as server:
        admin(server, "params/activate", {**SIGNED, "version": stable})
        start_rollout(server, candidate, plan="50:600:1,100:600:1")
        seen = {(usage["arm"], usage["attention_tolerance"]) for usage in (served(server, user=str(key)) for key in range(16))}
    assert seen == {("stable", 0.02), ("candidate", 0.05)}


def test_arms_that_would_need_two_caches_are_refused(store):
    stable, candidate = version(store), version(store, recompute_budget=1)
    with operated(store) as server:
        admin(server, "params/activate", {**SIGNED, "version": stable})
        refused = admin(server, "rollout/start", {**SIGNED, "candidate": candidate}, 409)
    assert "recompute_budget" in refused["error"]["message"]


def test_good_candidate_is_promoted_step_by_step(store):
    ref = version(store)
    with operated(store) as server:
        start_rollout(server, ref)
        weights = set()

        def promoted():
            served(server, user=str(time.monotonic()))
            rollout = admin(server, "rollout")["rollout"]
            weights.add(rollout["weight"])
            return rollout["state"] == "promoted"

        until(promoted, 40)
        usage = served(server)
        history = [event["kind"] for event in admin(server, "params/history")["events"]]
    assert weights == {5, 50, 100}
    assert (usage["params_version"], usage["arm"], usage["fidelity"]) == (ref, None, "bounded")
    assert history[:5] == ["activate", "rollout.promote", "rollout.step", "rollout.step", "rollout.start"]


def test_candidate_that_drifts_is_rolled_back_by_the_guard(store):
    """Its tolerance lets everything be read from sketches of two bits; a shadow sample sees it."""
    ref = version(store, attention_tolerance=1.0, hot_max_share=0.0)

    def load():
        return adaptive_engine(sketch_bits=2)

    limits = {**OPEN_LIMITS, "shadow_kl": 1e-9, "min_shadow_tokens": 10, "min_audits": 0}
    with operated(store, load, shadow_share=1.0) as server:
        start_rollout(server, ref, plan="50:0:1,100:0:1", limits=limits)

        def aborted():
            server.complete(LONG, max_tokens=24, ignore_eos=True, user=str(time.monotonic()))
            return admin(server, "rollout")["rollout"]["state"] == "aborted"

        until(aborted, 60)
        told = admin(server, "rollout")["rollout"]
        assert (told["reason"], served(server)["fidelity"]) == (told["reason"], "bounded"), "as the service was started"
        assert "shadow" in told["reason"]
    assert store.active(PROFILE) is None


def test_second_rollout_is_refused_while_one_runs(store):
    first, second = version(store), version(store, attention_tolerance=0.03)
    with operated(store) as server:
        start_rollout(server, first, plan="50:600:1,100:600:1")
        assert "promote or abort" in admin(server, "rollout/start", {**SIGNED, "candidate": second}, 409)["error"]["message"]
        assert admin(server, "rollout/abort", SIGNED)["rollout"]["state"] == "aborted"


def test_request_with_terms_of_its_own_is_no_sample(store):
    ref = version(store)
    with operated(store) as server:
        start_rollout(server, ref, plan="100:600:1")
        assert served(server, vera={"attention_tolerance": 0.5})["attention_tolerance"] == 0.5
        assert served(server, vera={"fidelity": "exact"})["fidelity"] == "exact"
        served(server)
        assert admin(server, "rollout")["arms"]["candidate"]["requests"] == 1


def test_rollout_survives_a_restart(store):
    ref = version(store)
    with operated(store) as server:
        start_rollout(server, ref, plan="50:600:1,100:600:1")
        before = {key: served(server, user=key)["arm"] for key in map(str, range(12))}
    with operated(store) as server:
        assert {key: served(server, user=key)["arm"] for key in before} == before
        assert admin(server, "rollout")["rollout"]["state"] == "running"


# -- the degrade switch ------------------------------------------------------------------------------------------------


def test_degraded_service_serves_natively_whatever_a_request_asks_for(store):
    with operated(store) as server:
        assert admin(server, "degrade", {**SIGNED, "override": "degraded"})["state"] == "open"
        usage = served(server, vera={"attention_tolerance": 0.5})
        assert (usage["fidelity"], usage["attention_tolerance"], usage["arm"]) == ("native", None, "degraded")
        assert server.metric("vera_degraded") == 1
        assert admin(server, "degrade", {**SIGNED, "override": "auto"})["state"] != "open"


def test_degrading_needs_no_profile():
    with running(adaptive_engine, oversight=Oversight(ParameterStore(None), None), admin_key="admin") as server:
        assert "no profile" in admin(server, "rollout/start", {**SIGNED, "candidate": "a@1"}, 409)["error"]["message"]
        admin(server, "degrade", {**SIGNED, "override": "degraded"})
        assert served(server)["arm"] == "degraded"


def test_native_service_has_nothing_to_operate():
    with running(speaking_engine, admin_key="admin") as server:
        assert admin(server, "degrade", status=409)["error"]["code"] == "native_cache"
        assert admin(server, "stats")["operations"] is None


def test_answers_go_on_as_native_after_the_flip():
    """Sixteen that run, far outside of any sensible tolerance before it; fp32, token by token."""
    prompts = [[3 + (index * 7 + at * at) % 90 for at in range(200)] for index in range(16)]
    loose = {"attention_tolerance": 1.0, "hot_max_share": 0.0, "sketch_bits": 2}
    engine = adaptive_engine(cache_max_bytes=60_000_000, max_num_seqs=16, **loose)
    names = [engine.add_request(prompt, greedy(80)) for prompt in prompts]
    answers = {name: [] for name in names}

    def step():
        for update in engine.step():
            answers[update.request_id] += update.new_token_ids
            assert update.finish_reason in (None, FinishReason.LENGTH)

    while min(map(len, answers.values())) < 30:
        step()
    assert engine.num_running == 16
    moved, left_behind = make_native(engine)
    assert (len(moved), set(moved.values()), left_behind) == (16, {"native"}, False)
    before = {name: list(tokens) for name, tokens in answers.items()}
    while engine.has_unfinished():
        step()
    engine.close()

    assert {len(tokens) for tokens in answers.values()} == {80}, "no token is lost"
    native = speaking_engine(max_num_seqs=16, blocks=1200)
    for name, prompt in zip(names, prompts, strict=True):
        kept = before[name]
        native.add_request([*prompt, *kept], greedy(80 - len(kept)), request_id=name)
    continued = {
        name: [token for update in updates for token in update.new_token_ids] for name, updates in finish(native).items()
    }
    assert continued == {name: tokens[len(before[name]) :] for name, tokens in answers.items()}


def test_degrading_under_load_ends_every_running_answer_well(store):
    def ask(server, key):
        body = {"prompt": LONG, "max_tokens": 200, "ignore_eos": True, "user": str(key)}
        return server.events("/v1/completions", body)[-1]["choices"][0]["finish_reason"]

    with operated(store) as server, ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(ask, server, key) for key in range(16)]
        until(lambda: server.busy()[0] == 8)
        moved = admin(server, "degrade", {**SIGNED, "override": "degraded"})["moved"]
        fidelities = {job["fidelity"] for job in admin(server, "stats")["requests"]}
        assert {answer.result(60) for answer in answers} == {"length"}
        server.wait_until_idle()
    assert moved >= 8 and fidelities == {"native"}


def test_flip_is_written_with_its_author_and_reason(store):
    with operated(store) as server:
        admin(server, "degrade", {"author": "bob", "reason": "P99 doubled", "override": "degraded"})
        event = admin(server, "params/history?limit=1")["events"][0]
    assert (event["kind"], event["author"], event["reason"]) == ("degrade", "bob", "P99 doubled")
    assert store.verify().ok


def test_flip_by_a_command_in_another_process_moves_what_runs(store):
    from vera.rollout import DegradeSwitch, Override

    with operated(store) as server:
        DegradeSwitch(store, PROFILE).override(Override.OPEN, author="ann", reason="from elsewhere")
        until(lambda: served(server)["arm"] == "degraded")


def hold_store(path):
    """Another process in the middle of a long change."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    return connection


def test_running_requests_are_moved_although_the_store_is_locked(store):
    with operated(store) as server, ThreadPoolExecutor(2) as pool:
        answer = pool.submit(server.events, "/v1/completions", {"prompt": LONG, "max_tokens": 700, "ignore_eos": True})
        until(lambda: server.busy()[0] == 1)
        other = hold_store(store.path)
        degrading = pool.submit(admin, server, "degrade", {**SIGNED, "override": "degraded"})
        until(lambda: server.on_loop(modes_of(server)) == ["native"], 2)
        other.rollback()
        other.close()
        assert degrading.result(30)["moved"] == 1
        assert answer.result(60)[-1]["choices"][0]["finish_reason"] == "length"


async def modes_of(server):
    return [job["mode"] for job in server.service.jobs()]


def test_degrade_that_cannot_be_recorded_is_told_as_done(store, tmp_path):
    with operated(store) as server:
        store.path.rename(tmp_path / "elsewhere")
        told = admin(server, "degrade", {**SIGNED, "override": "degraded"})
        assert (told["state"], told["unrecorded"]) == ("open", 1) and told["failure"]
        assert served(server)["arm"] == "degraded"


def test_request_that_cannot_be_moved_does_not_keep_the_others(monkeypatch):
    engine = adaptive_engine()
    names = [engine.add_request(LONG, greedy(40)) for _ in range(3)]
    for _ in range(6):
        engine.step()
    whole = engine.set_fidelity

    def failing(request_id, fidelity):
        if request_id == names[1]:
            raise RuntimeError("broken")
        whole(request_id, fidelity)

    monkeypatch.setattr(engine, "set_fidelity", failing)
    moved, left_behind = make_native(engine)
    assert (set(moved), left_behind) == ({names[0], names[2]}, True)
    engine.close()


def test_degraded_request_that_does_not_fit_natively_is_served_exactly(store):
    def load():
        return adaptive_engine(cache_max_bytes=900_000)

    with operated(store, load) as server:
        longest = server.inspect(lambda engine: engine.cache.longest_sequence("native", engine.cache.config))
        served_length = server.inspect(lambda engine: engine.max_model_len)
        assert longest + 20 < served_length
        admin(server, "degrade", {**SIGNED, "override": "degraded"})
        prompt = [3 + at % 90 for at in range(longest + 10)]
        usage = server.complete(prompt, max_tokens=4)["usage"]["vera"]
    assert (usage["fidelity"], usage["attention_tolerance"], usage["arm"]) == ("exact", None, "degraded")


# -- what counts for whom ----------------------------------------------------------------------------------------------


def operations_of(store, **more):
    oversight = Oversight(store, PROFILE, pinned=PINNED, breaker=BreakerSettings(memory_share=None), **more)
    return Operations(oversight, CacheConfig(mode="adaptive"), longest_native=1000)


def ended(operations, serving, reason=FinishReason.LENGTH, **more):
    use = CacheUse(decode_steps=10, uncovered_hits=50)
    operations.ended(serving, Update("a", finish_reason=reason, cache_use=use), 0.1, [0.01], None, **more)


def test_own_terms_of_a_request_do_not_reach_the_breaker(store):
    operations = operations_of(store)
    own, plain = operations.serve("a", 10, None, 1.0), operations.serve("a", 10, None, None)
    for serving in (own, plain):
        operations.begun("engine-id", serving)
        operations._take_audit(AuditResult("engine-id", 0, 0.5, 0.1))
        ended(operations, serving)
        signals = operations._signals()
        seen = (None, None, 0) if serving is own else (0.5, 5.0, 1)
        assert (signals.audit_error, signals.uncovered_per_step, signals.adaptive_requests) == seen


def test_candidate_is_the_guards_and_not_the_breakers(store):
    operations = operations_of(store, shadow_share=1.0)
    operations.rollouts.start(version(store), author="ann", reason="a test", plan=Plan.parse("100:600:1"))
    serving = operations.serve("a", 10, None, None)
    operations.begun("engine-id", serving)
    operations._take_audit(AuditResult("engine-id", 0, 0.5, 0.1))
    ended(operations, serving)
    assert operations._signals().audit_error is None
    candidate = operations.rollouts.status()["arms"]["candidate"]
    assert (candidate["audits"], candidate["uncovered_hits"]) == (1, 50)


def test_nothing_is_promoted_while_all_is_native(store):
    operations = operations_of(store, shadow_share=1.0)
    limits = Limits.from_dict({**OPEN_LIMITS, "recompute_share": None})
    operations.rollouts.start(version(store), author="ann", reason="a test", plan=Plan.parse("100:0:1"), limits=limits)
    ended(operations, operations.serve("a", 10, None, None))
    operations.switch.override(Override.OPEN, author="ann", reason="a test")
    operations._look_at_store()
    assert operations.rollouts.current is not None
    operations.switch.override(Override.CLOSED, author="ann", reason="a test")
    operations._look_at_store()
    assert operations.rollouts.latest.state == "promoted"


def test_deadline_that_a_client_chose_is_not_the_servers_failure(store):
    operations = operations_of(store, shadow_share=1.0)
    operations.rollouts.start(version(store), author="ann", reason="a test", plan=Plan.parse("100:600:1"))
    serving = operations.serve("a", 10, None, None)
    ended(operations, serving, FinishReason.TIMEOUT, own_deadline=True)
    ended(operations, serving, FinishReason.TIMEOUT)
    candidate = operations.rollouts.status()["arms"]["candidate"]
    assert (candidate["requests"], candidate["errors"]) == (1, 1)


def test_estimated_error_that_is_not_finite_leaves_statistics_readable(store):
    operations = operations_of(store)
    for error in (math.nan, math.inf):
        use = CacheUse(decode_steps=1, error_sum=error, error_count=1, error_max=error)
        update = Update("a", finish_reason=FinishReason.LENGTH, cache_use=use)
        operations.ended(operations.serve("a", 10, None, None), update, 0.1, [], None)
    json.dumps(operations.errors(), allow_nan=False)


def test_rollout_that_needs_shadows_is_refused_where_there_are_none(store):
    ref = version(store)
    with operated(store, shadow_share=0.0) as server:
        refused = admin(server, "rollout/start", {**SIGNED, "candidate": ref}, 409)
    assert "--shadow-share 0" in refused["error"]["message"]


def test_guard_stops_a_candidate_although_the_store_is_gone(store, tmp_path):
    operations = operations_of(store, shadow_share=1.0)
    operations.rollouts.start(version(store), author="ann", reason="a test", plan=Plan.parse("100:0:1"))
    serving = operations.serve("a", 10, None, None)
    for _ in range(20):
        failed = Update("a", finish_reason=FinishReason.ERROR, error="logits that are not finite numbers")
        operations.ended(serving, failed, None, [], None)
    store.path.rename(tmp_path / "elsewhere")
    operations._look_at_store()
    assert operations.serve("a", 10, None, None).arm == "stable"


# -- what people see ---------------------------------------------------------------------------------------------------


def test_statistics_tell_version_rollout_switch_and_events(store):
    ref = version(store)
    with operated(store) as server:
        admin(server, "params/activate", {**SIGNED, "version": ref})
        served(server)
        told = admin(server, "stats")
    operations = told["operations"]
    assert operations["version"]["ref"] == ref
    assert operations["degrade"]["state"] == "closed"
    assert operations["rollout"] == {"rollout": None}
    assert operations["modes"]["adaptive"]["requests"] == 1
    assert operations["events"][0]["kind"] == "activate"
    json.dumps(told, allow_nan=False)


def test_page_map_of_a_running_answer(store):
    with operated(store) as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": LONG, "max_tokens": 400, "ignore_eos": True}
        answer = pool.submit(server.events, "/v1/completions", body, headers={"X-Request-Id": "mine"})
        until(lambda: any(job["completion_tokens"] > 30 for job in admin(server, "stats")["requests"]))
        pages = admin(server, "requests/mine/pages")
        answer.result(60)
        assert admin(server, "requests/mine/pages", status=404)["error"]["type"] == "invalid_request_error"
    assert len(pages["tier"]) == len(pages["heat"]) == pages["layers"]
    assert {len(row) for row in pages["tier"] + pages["heat"]} == {pages["blocks"]}
    assert set("".join("".join(row) for row in pages["tier"])) <= set("ehwc")
    assert all(0 <= score <= 1 for row in pages["heat"] for score in row)


def test_metrics_name_the_version_and_the_weight(store):
    ref = version(store)
    with operated(store) as server:
        start_rollout(server, ref, plan="25:600:1,100:600:1")
        assert server.metric("vera_rollout_weight") == 25
        admin(server, "rollout/promote", {**SIGNED, "full": True})
        assert server.metric(f'vera_params_version_info{{profile="{PROFILE}",version="{ref}"}}') == 1
        assert server.metric("vera_rollout_weight") == 0


# -- under load --------------------------------------------------------------------------------------------------------


def test_two_hundred_switches_under_load_drop_no_request_and_mix_no_version(store):
    refs = [version(store, attention_tolerance=0.01 + index / 100) for index in range(4)]
    tolerances = {ref: 0.01 + index / 100 for index, ref in enumerate(refs)}
    with operated(store) as server, ThreadPoolExecutor(6) as pool:
        admin(server, "params/activate", {**SIGNED, "version": refs[0]})
        ends = threading.Event()

        def ask_on(worker):
            seen = []
            while not ends.is_set():
                answer = server.complete(LONG[: 100 + worker], max_tokens=12, ignore_eos=True)
                seen.append((answer["usage"]["vera"], answer["choices"][0]["finish_reason"]))
            return seen

        workers = [pool.submit(ask_on, worker) for worker in range(6)]
        for turn in range(200):
            admin(server, "params/activate", {**SIGNED, "version": refs[(turn + 1) % 4]})
        ends.set()
        seen = [one for worker in workers for one in worker.result(60)]
        server.wait_until_idle()
    assert len(seen) >= 50
    assert {reason for _, reason in seen} == {FinishReason.LENGTH.value}
    assert all(usage["attention_tolerance"] == pytest.approx(tolerances[usage["params_version"]]) for usage, _ in seen)
    assert len({usage["params_version"] for usage, _ in seen}) == 4
    assert store.verify().ok


def test_half_open_switch_closes_by_a_candidates_requests_too(store):
    """In a rollout from native nobody else is adaptive, and its guard rests."""
    operations = operations_of(store, shadow_share=1.0)
    operations.rollouts.start(version(store), author="ann", reason="a test", plan=Plan.parse("100:600:1"))
    serving = operations.serve("a", 10, None, None)
    operations.switch.override(Override.OPEN, author="ann", reason="a test")
    operations.switch.override(Override.NONE, author="ann", reason="a test")
    assert operations.switch.breaker.state == "half-open"
    ended(operations, serving)
    assert operations._signals().adaptive_requests == 1


def test_degraded_request_that_is_served_exactly_counts_as_native(store):
    operations = operations_of(store)
    operations.switch.override(Override.OPEN, author="ann", reason="a test")
    serving = operations.serve("a", 5000, None, None)
    assert serving.fidelity == "exact"
    ended(operations, serving)
    assert operations._signals().adaptive_requests == 0
    assert operations.status()["modes"]["native"]["requests"] == 1
