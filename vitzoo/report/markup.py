"""HTML and SVG as trees of elements, so that all text is escaped."""

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

__all__ = ['Element', 'tag', 'to_html']


def tag(name: str, *children: Element | str | Iterable | None, **attributes: object) -> Element:
    """Create an element; children and attributes that are None are left out.

    In names of attributes, underscores stand for hyphens, and a trailing underscore is dropped (`class_`, `for_`).
    """
    element = Element(name)
    for key, value in attributes.items():
        if value is not None:
            element.set(key.rstrip('_').replace('_', '-'), f'{value:.2f}' if isinstance(value, float) else str(value))
    for child in children:
        _append(element, child)
    return element


def _append(parent: Element, child: Element | str | Iterable | None) -> None:
    if isinstance(child, Element):
        parent.append(child)
    elif isinstance(child, str):
        # text belongs to the parent before its first child, and to the previous child's tail after it
        if len(parent):
            parent[-1].tail = (parent[-1].tail or '') + child
        else:
            parent.text = (parent.text or '') + child
    elif child is not None:
        for part in child:
            _append(parent, part)


def to_html(element: Element) -> str:
    """Serialize an element as HTML."""
    return tostring(element, encoding='unicode', method='html')
