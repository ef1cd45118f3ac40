//go:build linux && cgo

package rdmacore

import (
	"fmt"
	"log/slog"

	"github.com/rdmanet/rdmanet/internal/printed"
)

// The devices' objects print as their names, by package fmt with any verb and by
// log/slog: their fields are queues and registered memory, and change while they are
// read. Nothing here takes a lock.

func (d *device) String() string { return d.name }

func (d *device) Format(s fmt.State, verb rune) { printed.Format(s, verb, d.String()) }

func (d *device) LogValue() slog.Value { return slog.StringValue(d.String()) }

func (p *pd) String() string { return p.dev.name + ": protection domain" }

func (p *pd) Format(s fmt.State, verb rune) { printed.Format(s, verb, p.String()) }

func (p *pd) LogValue() slog.Value { return slog.StringValue(p.String()) }

func (m *mr) String() string {
	return fmt.Sprintf("%s: region of %d bytes, key %#x", m.pd.dev.name, len(m.buf), m.lkey)
}

func (m *mr) Format(s fmt.State, verb rune) { printed.Format(s, verb, m.String()) }

func (m *mr) LogValue() slog.Value { return slog.StringValue(m.String()) }

func (c *cq) String() string {
	return fmt.Sprintf("%s: completion queue of %d entries", c.dev.name, c.depth)
}

func (c *cq) Format(s fmt.State, verb rune) { printed.Format(s, verb, c.String()) }

func (c *cq) LogValue() slog.Value { return slog.StringValue(c.String()) }

func (q *qp) String() string { return fmt.Sprintf("%s: queue pair %d", q.dev.name, q.num) }

func (q *qp) Format(s fmt.State, verb rune) { printed.Format(s, verb, q.String()) }

func (q *qp) LogValue() slog.Value { return slog.StringValue(q.String()) }

func (i *id) String() string { return fmt.Sprintf("%s: connection to %v", Name, i.remote) }

func (i *id) Format(s fmt.State, verb rune) { printed.Format(s, verb, i.String()) }

func (i *id) LogValue() slog.Value { return slog.StringValue(i.String()) }

func (a *ah) String() string { return a.pd.dev.name + ": address handle" }

func (a *ah) Format(s fmt.State, verb rune) { printed.Format(s, verb, a.String()) }

func (a *ah) LogValue() slog.Value { return slog.StringValue(a.String()) }

func (l *listener) String() string { return fmt.Sprintf("%s: listener on %v", Name, l.addr) }

func (l *listener) Format(s fmt.State, verb rune) { printed.Format(s, verb, l.String()) }

func (l *listener) LogValue() slog.Value { return slog.StringValue(l.String()) }
