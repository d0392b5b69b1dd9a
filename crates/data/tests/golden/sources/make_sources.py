"""Writes data files with the usual libraries, and the rows that reading them must give.

    pip install datasets==5.2.0 pyarrow==26.0.1 && python make_sources.py

Every file holds the same rows (rows.json), so the test compares each of them with rows.json.
"""

import json
import pathlib
import shutil

import datasets
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet

HERE = pathlib.Path(__file__).parent
ROWS = [
    {
        "text": f"row {index} é",
        "kind": ["chat", "code"][index % 2],
        "count": index * 1000 - 2000,
        "share": index / 8,
        "good": index % 3 == 0,
        "note": None if index % 4 == 1 else f"n{index}",
        "messages": [{"role": "user", "content": f"q{turn}"} for turn in range(index % 3)],
        "ids": list(range(index % 5)),
    }
    for index in range(40)
]


def main():
    for old in HERE.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
    (HERE / "rows.json").write_text(json.dumps(ROWS, ensure_ascii=False))
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(HERE / "saved", num_shards=3)
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(2))}).save_to_disk(HERE / "saved_dict")
    dataset.to_parquet(HERE / "datasets.parquet")
    dataset.to_json(HERE / "datasets.jsonl", force_ascii=False)
    table = pa.Table.from_pylist(ROWS)
    kind = table.schema.get_field_index("kind")
    coded = table.set_column(kind, "kind", table.column("kind").dictionary_encode())
    parquet.write_table(coded, HERE / "zstd.parquet", compression="zstd", row_group_size=16, data_page_version="2.0")
    parquet.write_table(table, HERE / "gzip.parquet", compression="gzip", use_dictionary=False)
    parquet.write_table(table, HERE / "lz4.parquet", compression="lz4", version="1.0")
    large = coded.set_column(0, "text", coded.column("text").cast(pa.large_string()))
    feather.write_feather(large, HERE / "lz4.feather", compression="lz4", chunksize=16)
    view = table.set_column(0, "text", table.column("text").cast(pa.string_view()))
    feather.write_feather(view, HERE / "zstd.feather", compression="zstd")
    with pa.ipc.new_stream(HERE / "stream.arrow", coded.schema) as writer:
        for batch in coded.to_batches(max_chunksize=7):
            writer.write_batch(batch)


main()
