// The last ten minutes: rates are differences of counters between two polls.

export const SPAN_SECONDS = 600;
const WINDOW_SECONDS = 10;
const GAP_SECONDS = 15;
const LEAST_SECONDS = 0.5;

export const SERIES = [
  "tokens", "qps", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "hits", "cold_hits", "uncovered", "recompute", "estimated", "true",
];

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.times = [];
    this.values = Object.fromEntries(SERIES.map((name) => [name, []]));
    this._samples = [];
  }

  get latest() {
    return Object.fromEntries(SERIES.map((name) => [name, this.values[name].at(-1) ?? null]));
  }

  /**
   * Takes in one poll. `now` is the Unix time here, `clock` the seconds of a clock that does not jump. True: a counter fell, so the
   * service has been restarted, and all begins anew.
   */
  add(stats, now, clock) {
    if (stats.engine === null) return false;
    const sample = { clock, counters: countersOf(stats) };
    const before = this._samples.at(-1);
    const restarted = before !== undefined && falls(before.counters, sample.counters);
    // Times must grow: where the clock of this machine was set back, what was before has no place.
    if (restarted || now <= (this.times.at(-1) ?? 0)) this.clear();
    else if (before !== undefined && clock - before.clock > GAP_SECONDS) this._break((now + this.times.at(-1)) / 2);
    this._samples.push(sample);
    while (this._samples.length > 1 && sample.clock - this._samples[0].clock > WINDOW_SECONDS) this._samples.shift();
    this._push(now, { ...levels(stats), ...rates(this._samples[0], sample) });
    return restarted;
  }

  _push(time, values) {
    this.times.push(time);
    for (const name of SERIES) this.values[name].push(values[name] ?? null);
    while (this.times.length && time - this.times[0] > SPAN_SECONDS) {
      this.times.shift();
      for (const name of SERIES) this.values[name].shift();
    }
  }

  /** Nothing is known of the time between: lines are not drawn through it, and no rate spans it. */
  _break(time) {
    this._push(time, {});
    this._samples = [];
  }
}

function countersOf({ engine, cache }) {
  const counters = {
    finished: Object.values(engine.finished ?? {}).reduce((sum, part) => sum + part, 0),
    tokens: engine.generated_tokens,
    steps: engine.steps,
  };
  for (const name of ["hits", "cold_hits", "uncovered_hits", "decode_steps", "recompute_steps"]) {
    counters[name] = cache?.counters?.[name] ?? null;
  }
  return counters;
}

function falls(before, after) {
  return Object.keys(after).some((name) => before[name] !== null && after[name] !== null && after[name] < before[name]);
}

function rates(first, last) {
  const passed = last.clock - first.clock;
  if (passed < LEAST_SECONDS) return {};
  const grown = (name) => (last.counters[name] === null || first.counters[name] === null ? null : last.counters[name] - first.counters[name]);
  const each = (name) => (grown("decode_steps") ? grown(name) / grown("decode_steps") : null);
  return {
    tokens: grown("tokens") / passed,
    qps: grown("finished") / passed,
    hits: each("hits"),
    cold_hits: each("cold_hits"),
    uncovered: each("uncovered_hits"),
    recompute: each("recompute_steps"),
  };
}

function levels({ engine, errors }) {
  return {
    ttft_p50: engine.ttft_ms_p50,
    ttft_p99: engine.ttft_ms_p99,
    itl_p50: engine.itl_ms_p50,
    itl_p99: engine.itl_ms_p99,
    estimated: errors?.estimated_mean ?? null,
    true: errors?.true_mean ?? null,
  };
}
