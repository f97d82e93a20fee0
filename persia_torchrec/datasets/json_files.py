"""Files of JSON objects, one a line."""

from collections.abc import Iterator, Sequence
from typing import Any

from persia_torchrec.datasets.columns import require
from persia_torchrec.datasets.files import Block, TextFile, count_rows, has_rows
from persia_torchrec.errors import DataError


class JsonFile(TextFile):
    """One file of JSON objects, one a line; columns are found by their names."""

    def _table(self, block: Block, sources: Sequence[str]) -> Any:
        arrow = require("pyarrow")
        wanted = {name.partition(".")[0] for name in sources} | set(sources)
        table = self._read(block, wanted)
        found = self.picked(table, sources)
        self.require_columns(
            {name: found[name].type for name in found} | self.partition_types(),
            table.column_names,
            lacking=not self._names,
        )
        self._names = self._names or table.column_names
        gaps = [name for name in sources if name not in found]
        if gaps:
            empty = arrow.nulls(table.num_rows)
            found |= {n: empty for n in gaps if n not in self.partition_types()}
        return self.with_partitions(arrow.table(found), sources)

    def raw_tables(self) -> Iterator[Any]:
        """Yield all lines as Arrow tables."""
        for block in self.all_blocks():
            if has_rows(block.data):
                yield self._read(block, None)

    def _read(self, block: Block, wanted: set[str] | None) -> Any:
        """Return lines as a table; columns that are wanted (None: all) keep text."""
        arrow = require("pyarrow")
        data = self.checked(block)
        try:
            table = self._read_json(data, {})
            texts = {
                field.name: kind
                for field in table.schema  # where pyarrow has taken text for times
                if wanted is None or field.name in wanted
                if (kind := _with_texts(field.type)) != field.type
            }
            if texts:
                table = self._read_json(data, texts)
        except (arrow.ArrowException, UnicodeError) as exc:
            raise self._located(block, exc) from exc
        if table.num_rows != count_rows(block.data):
            raise self._located(block, None)
        return table

    def _read_json(self, data: bytes, types: dict[str, Any]) -> Any:
        arrow, json = require("pyarrow"), require("pyarrow.json")
        return json.read_json(
            arrow.BufferReader(data),
            json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            json.ParseOptions(explicit_schema=arrow.schema(types) if types else None),
        )

    def _located(self, block: Block, exc: Exception | None) -> DataError:
        arrow = require("pyarrow")
        for number, line in self.lines(block):
            try:
                one = self._read_json(line + b"\n", {}).num_rows == 1
            except arrow.ArrowException:
                one = False
            if not one:
                return self._error(number, "a line must be one JSON object.", line)
        return self.not_utf8(block) or DataError(
            f"{self.source.url} must have values of one type in each column. "
            f"Received: {exc}."
        )


def _with_texts(kind: Any) -> Any:
    """Return a type with text in place of times."""
    arrow = require("pyarrow")
    if arrow.types.is_timestamp(kind):
        return arrow.string()
    if arrow.types.is_list(kind):
        return arrow.list_(_with_texts(kind.value_type))
    if arrow.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return arrow.struct([(f.name, _with_texts(f.type)) for f in fields])
    return kind
