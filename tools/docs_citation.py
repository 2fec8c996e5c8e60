"""Writes CITATION.cff from vitzoo/papers.bib. Run by `make docs`."""

import re
import sys
from pathlib import Path

import yaml

import vitzoo
from vitzoo.cite import Paper, read_papers

FILE = Path(__file__).resolve().parents[1] / 'CITATION.cff'
TYPES = {'inproceedings': 'conference-paper', 'techreport': 'report'}


def main() -> None:
    """Write the file."""
    FILE.write_text(render(), encoding='utf-8')
    print(f'wrote {FILE}', file=sys.stderr)


def render() -> str:
    """The whole file."""
    citation = {
        'cff-version': '1.2.0',
        'message': 'Please cite the papers of the models that you use, which `vitzoo cite MODEL` prints as BibTeX.',
        'type': 'software',
        'title': 'vitzoo: vision transformer backbones and efficient token mixers, in every combination',
        'authors': [{'name': 'The vitzoo authors'}],
        'version': vitzoo.__version__,
        'license': 'Apache-2.0',
        'references': [to_reference(paper) for paper in read_papers().values()],
    }
    return yaml.safe_dump(citation, sort_keys=False, allow_unicode=True, width=120)


def to_reference(paper: Paper) -> dict:
    """An entry of papers.bib in the Citation File Format."""
    kind = re.match(r'@(\w+)', paper.bibtex)[1]
    authors = [name.split(', ') for name in paper.fields['author'].split(' and ')]
    url = paper.fields.get('url') or (
        f'https://arxiv.org/abs/{paper.fields["eprint"]}' if 'eprint' in paper.fields else None
    )
    return {
        'type': TYPES.get(kind, 'article' if 'eprint' in paper.fields else 'software'),
        'title': re.sub(r'[{}$\\]', '', paper.fields['title']),
        'authors': [{'family-names': family, 'given-names': given} for family, given in authors],
        'year': int(paper.fields['year']),
        **({'url': url} if url else {}),
    }


if __name__ == '__main__':
    main()
