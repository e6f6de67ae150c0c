"""The headline table of a README, between two marker comments, from the JSON of the results.

python -m vera.bench.table.readme docs/results/table.json README.md README.zh-CN.md
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vera.bench.table.report import RATIO_NAMES
from vera.bench.table.results import headline_lines, read_document
from vera.errors import ConfigError, VeraError

BEGIN, END = "<!-- vera bench table: begin -->", "<!-- vera bench table: end -->"

_CHINESE = {
    "ratio": "自适应 / 原生",
    "process_bytes": "进程总内存",
    "cache_bytes": "缓存内存",
    "itl_mean": "平均逐字延迟",
    "itl_p99": "P99 逐字延迟",
    "throughput": "解码吞吐",
    "sequences_at_equal_memory": "相同缓存内存下的序列数",
    "throughput_at_equal_memory": "相同缓存内存下的解码吞吐",
}


def readme_table(document: Mapping[str, Any], *, chinese: bool = False) -> str:
    """What belongs between the markers: what was measured where, and the headline."""
    row = next((row for row in document["rows"] if row["part"] == "headline"), None)
    if row is None:
        raise VeraError("the results have no headline: run `vera bench table` again")
    machine, rounds = document["machine"], row["repeats"]
    size = f"{row['batch']} x {row['context']:,} + {row['new_tokens']}"
    if chinese:
        origin = (
            f"{document['model']}，批次 × 提示 + 回答 = {size} 词元，{machine['cpu']}，{machine['threads']} 线程，"
            f"{document['date']}，提交 {document['commit']}，`{document['command']}`；"
            f"{rounds} 轮交替运行的中位数，括号内为各轮的最小与最大比值（[全部结果](docs/results.md)）："
        )
    else:
        origin = (
            f"{document['model']}, batch x prompt + answer = {size} tokens, {machine['cpu']}, {machine['threads']} threads, "
            f"{document['date']}, commit {document['commit']}, `{document['command']}`; medians of {rounds} alternating rounds, "
            "in brackets the least and the largest ratio of a round ([all results](docs/results.md)):"
        )
    return "\n".join([origin, "", *headline_lines(document, _CHINESE if chinese else RATIO_NAMES)])


def with_table(text: str, table: str) -> str:
    """The text with `table` between its markers, whatever was there. A ConfigError says so where they are not there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"the file must have the lines {BEGIN} and {END} once each, in this order, where the table belongs")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    return f"{before}{BEGIN}\n{table}\n{after}"


def main(arguments: Sequence[str]) -> None:
    """Rewrites each README; one whose name has `zh` gets Chinese words."""
    if len(arguments) < 2:
        raise ConfigError("usage: python -m vera.bench.table.readme docs/results/table.json README.md ...")
    document = read_document(Path(arguments[0]))
    for path in map(Path, arguments[1:]):
        table = readme_table(document, chinese="zh" in path.name)
        path.write_text(with_table(path.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (VeraError, OSError) as error:
        sys.exit(f"vera: {error}")
