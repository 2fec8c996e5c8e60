"""Adds the README and the other pages outside docs/ to the site, with links to them. Used by mkdocs.yml."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# pages outside docs/, by their name on the site
OTHERS = {
    'index.md': 'README.md',
    'contributing.md': 'CONTRIBUTING.md',
    'changelog.md': 'CHANGELOG.md',
    'security.md': 'SECURITY.md',
    'results.md': 'weights/README.md',
    'sample.md': 'vitzoo/data/sample/README.md',
}
# a link that is not absolute and not within its page: path, and # with a heading
LINK = re.compile(r'\]\((?![a-z]+://|#)([^)#\s]+)(#[^)\s]*)?\)')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Order the pages as in the README's table of the documentation."""
    table = (ROOT / 'README.md').read_text('utf-8').partition('\n## Documentation\n')[2]
    pages = re.findall(r'\[([^\]]+)\]\(docs/(\w+\.md)\)', table)
    config.nav = [{'vitzoo': 'index.md'}, *({name: page} for name, page in pages), *list(OTHERS)[1:]]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and the files that pages link to."""
    for name, path in OTHERS.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    for page in [*ROOT.glob('docs/*.md'), *(ROOT / path for path in OTHERS.values())]:
        for target, _ in LINK.findall(page.read_text('utf-8')):
            name = name_on_site(page, target)
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace paths in the repository by names on the site."""
    source = Path(page.file.abs_src_path)
    return LINK.sub(lambda link: f']({name_on_site(source, link[1])}{link[2] or ""})', markdown)


def name_on_site(page: Path, target: str) -> str:
    """The name of a file that a page links to: in docs/ its own, elsewhere as in `OTHERS` or its path."""
    path = (page.parent / target).resolve().relative_to(ROOT).as_posix()
    names = {path: name for name, path in OTHERS.items()}
    return names.get(path, path.removeprefix('docs/'))
