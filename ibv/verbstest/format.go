package verbstest

import (
	"fmt"
	"log/slog"

	"github.com/rdmanet/rdmanet/internal/printed"
)

// Values that hold memory, or change while they are read, print as one short line, by
// package fmt with any verb and by log/slog.

// String names the provider that calls are handed on to.
func (s *Switch) String() string {
	if s == nil || s.inner == nil {
		return "verbstest: no switch"
	}
	return "verbstest: switch in front of " + s.inner.Name()
}

// Format prints String's text for every verb.
func (s *Switch) Format(f fmt.State, verb rune) { printed.Format(f, verb, s.String()) }

// LogValue logs String's text.
func (s *Switch) LogValue() slog.Value { return slog.StringValue(s.String()) }

// String says whether the fault has struck.
func (f *Fault) String() string {
	if f == nil {
		return "<nil>"
	}
	return fmt.Sprintf("verbstest: fault, fired: %t", f.Fired())
}

// Format prints String's text for every verb.
func (f *Fault) Format(s fmt.State, verb rune) { printed.Format(s, verb, f.String()) }

// LogValue logs String's text.
func (f *Fault) LogValue() slog.Value { return slog.StringValue(f.String()) }

// String says how long the memory is.
func (m *Mem) String() string {
	if m == nil {
		return "<nil>"
	}
	return fmt.Sprintf("verbstest: memory of %d bytes", len(m.Buf))
}

// Format prints String's text for every verb.
func (m *Mem) Format(s fmt.State, verb rune) { printed.Format(s, verb, m.String()) }

// LogValue logs String's text.
func (m *Mem) LogValue() slog.Value { return slog.StringValue(m.String()) }

// String names the device and the queue pair.
func (e *End) String() string {
	if e == nil || e.QP == nil {
		return "verbstest: no end"
	}
	return fmt.Sprintf("verbstest: queue pair %d", e.QP.QPN())
}

// Format prints String's text for every verb.
func (e *End) Format(s fmt.State, verb rune) { printed.Format(s, verb, e.String()) }

// LogValue logs String's text.
func (e *End) LogValue() slog.Value { return slog.StringValue(e.String()) }
