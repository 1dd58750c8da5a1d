"""What happened in a run, and what happens: the ring and its dossiers, `quantexp capture` and `quantexp watch`."""

from quantexp.extra import Extra, Service
from quantexp.extras.forensics.arguments import CAPTURE, WATCH

EXTRA = Extra(
    {"watch": WATCH, "capture": CAPTURE},
    {
        Service.DOSSIERS: "quantexp.extras.forensics.dossiers:Dossiers",
        Service.RING_PRICE: "quantexp.extras.forensics.ring.price:ring_and_dossier_bytes",
        Service.SHOWN_DOSSIERS: "quantexp.extras.forensics.shown:shown_dossiers",
    },
)
