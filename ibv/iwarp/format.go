package iwarp

import (
	"fmt"
	"log/slog"

	"github.com/rdmanet/rdmanet/internal/printed"
)

// The device's objects print as their names, by package fmt with any verb and by
// log/slog: their fields are queues and registered memory, and change while they are
// read. Nothing here takes a lock.

// String returns the device's name.
func (p *Provider) String() string { return Name }

// Format prints String's text for every verb.
func (p *Provider) Format(s fmt.State, verb rune) { printed.Format(s, verb, p.String()) }

// LogValue logs String's text.
func (p *Provider) LogValue() slog.Value { return slog.StringValue(p.String()) }

// String lists the fields that are not zero.
func (c Config) String() string { return printed.Struct(c) }

// LogValue logs the fields that are not zero.
func (c Config) LogValue() slog.Value { return printed.LogStruct(c) }

// LogValue logs String's text.
func (s SameHost) LogValue() slog.Value { return slog.StringValue(s.String()) }

// LogValue logs Error's text.
func (e *RemoteError) LogValue() slog.Value {
	if e == nil {
		return slog.StringValue("<nil>")
	}
	return slog.StringValue(e.Error())
}

func (d *device) String() string { return Name }

func (d *device) Format(s fmt.State, verb rune) { printed.Format(s, verb, d.String()) }

func (d *device) LogValue() slog.Value { return slog.StringValue(d.String()) }

func (p *pd) String() string { return Name + ": protection domain" }

func (p *pd) Format(s fmt.State, verb rune) { printed.Format(s, verb, p.String()) }

func (p *pd) LogValue() slog.Value { return slog.StringValue(p.String()) }

func (m *mr) String() string {
	return fmt.Sprintf("%s: region of %d bytes, STag %#x", Name, len(m.buf), m.stag)
}

func (m *mr) Format(s fmt.State, verb rune) { printed.Format(s, verb, m.String()) }

func (m *mr) LogValue() slog.Value { return slog.StringValue(m.String()) }

func (c *cq) String() string { return fmt.Sprintf("%s: completion queue of %d entries", Name, c.depth) }

func (c *cq) Format(s fmt.State, verb rune) { printed.Format(s, verb, c.String()) }

func (c *cq) LogValue() slog.Value { return slog.StringValue(c.String()) }

func (q *qp) String() string { return fmt.Sprintf("%s: queue pair %d", Name, q.num) }

func (q *qp) Format(s fmt.State, verb rune) { printed.Format(s, verb, q.String()) }

func (q *qp) LogValue() slog.Value { return slog.StringValue(q.String()) }

func (i *id) String() string { return fmt.Sprintf("%s: connection to %v", Name, i.remote) }

func (i *id) Format(s fmt.State, verb rune) { printed.Format(s, verb, i.String()) }

func (i *id) LogValue() slog.Value { return slog.StringValue(i.String()) }

func (l *listener) String() string { return fmt.Sprintf("%s: listener on %v", Name, l.addr) }

func (l *listener) Format(s fmt.State, verb rune) { printed.Format(s, verb, l.String()) }

func (l *listener) LogValue() slog.Value { return slog.StringValue(l.String()) }
