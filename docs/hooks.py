"""Hooks of mkdocs. The page of benchmarks includes benchmarks/README.md, so the figures must be beside that page."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `results/`: charts, raw figures, and a list of them, which a link to the directory opens."""
    results = Path(config.config_file_path).parent / "benchmarks" / "results"
    found = sorted(path for path in results.iterdir() if path.suffix in (".jsonl", ".svg"))
    for path in found:
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    links = "".join(f"- [{path.name}]({path.name})\n" for path in found)
    listing = f"# Raw figures of the [benchmarks](../benchmarks.md)\n\n{links}"
    files.append(File.generated(config, "results/index.md", content=listing, inclusion=InclusionLevel.NOT_IN_NAV))
    return files
