"""How runs, findings and heads are drawn: as text, as HTML, as SVG. Nothing here measures or judges."""
