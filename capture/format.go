package capture

import (
	"fmt"
	"log/slog"

	"github.com/rdmanet/rdmanet/internal/printed"
)

// Values that hold captured bytes print as one short line without them, by package fmt
// with any verb and by log/slog.

// Format prints String's text for every verb.
func (c *Conn) Format(s fmt.State, verb rune) { printed.Format(s, verb, c.String()) }

// LogValue logs String's text.
func (c *Conn) LogValue() slog.Value { return slog.StringValue(c.String()) }

// String names the address and the queue pair.
func (e End) String() string {
	return fmt.Sprintf("%v QP %#x, %d bytes of private data", e.Addr, e.QP, len(e.Private))
}

// Format prints String's text for every verb.
func (e End) Format(s fmt.State, verb rune) { printed.Format(s, verb, e.String()) }

// LogValue logs String's text.
func (e End) LogValue() slog.Value { return slog.StringValue(e.String()) }

// String says how long the packet is.
func (p Packet) String() string {
	return fmt.Sprintf("packet of %d bytes, %d captured", max(p.Length, len(p.Data)), len(p.Data))
}

// Format prints String's text for every verb.
func (p Packet) Format(s fmt.State, verb rune) { printed.Format(s, verb, p.String()) }

// LogValue logs String's text.
func (p Packet) LogValue() slog.Value { return slog.StringValue(p.String()) }

// String names the operation.
func (p RoCE) String() string {
	return fmt.Sprintf("%v to QP %#x, PSN %d, %d bytes", p.Opcode, p.DestQP, p.PSN, p.Size)
}

// Format prints String's text for every verb.
func (p RoCE) Format(s fmt.State, verb rune) { printed.Format(s, verb, p.String()) }

// LogValue logs String's text.
func (p RoCE) LogValue() slog.Value { return slog.StringValue(p.String()) }

// String names the message.
func (m CM) String() string {
	return fmt.Sprintf("%v, IDs %#x and %#x, QP %#x, %d bytes of private data", m.Attribute, m.LocalID, m.RemoteID, m.QPN, len(m.Private))
}

// Format prints String's text for every verb.
func (m CM) Format(s fmt.State, verb rune) { printed.Format(s, verb, m.String()) }

// LogValue logs String's text.
func (m CM) LogValue() slog.Value { return slog.StringValue(m.String()) }

// String names the operation.
func (m *Message) String() string {
	if m == nil {
		return "<nil>"
	}
	return fmt.Sprintf("%v of %d bytes, %d captured, complete: %t", m.Kind, m.Size, m.Got, m.Complete)
}

// Format prints String's text for every verb.
func (m *Message) Format(s fmt.State, verb rune) { printed.Format(s, verb, m.String()) }

// LogValue logs String's text.
func (m *Message) LogValue() slog.Value { return slog.StringValue(m.String()) }

// String names the message.
func (u *UpperMessage) String() string {
	if u == nil {
		return "<nil>"
	}
	return fmt.Sprintf("%v %v of %d bytes, %d captured, complete: %t", u.Protocol, u.Kind, u.Size, u.Got, u.Complete)
}

// Format prints String's text for every verb.
func (u *UpperMessage) Format(s fmt.State, verb rune) { printed.Format(s, verb, u.String()) }

// LogValue logs String's text.
func (u *UpperMessage) LogValue() slog.Value { return slog.StringValue(u.String()) }

// String says how long the chunk is.
func (c Chunk) String() string {
	return fmt.Sprintf("chunk of %d bytes in %d segments, %d captured, complete: %t", c.Size, len(c.Segments), c.Got, c.Complete)
}

// Format prints String's text for every verb.
func (c Chunk) Format(s fmt.State, verb rune) { printed.Format(s, verb, c.String()) }

// LogValue logs String's text.
func (c Chunk) LogValue() slog.Value { return slog.StringValue(c.String()) }

// String names the memory.
func (s *Segment) String() string {
	if s == nil {
		return "<nil>"
	}
	return fmt.Sprintf("segment %#x, %d bytes from %#x", s.Handle, s.Length, s.Offset)
}

// Format prints String's text for every verb.
func (s *Segment) Format(f fmt.State, verb rune) { printed.Format(f, verb, s.String()) }

// LogValue logs String's text.
func (s *Segment) LogValue() slog.Value { return slog.StringValue(s.String()) }

// String names the memory.
func (s *SubSegment) String() string {
	if s == nil {
		return "<nil>"
	}
	return fmt.Sprintf("%d bytes from %#x, PSNs from %d on", s.Length, s.Offset, s.FirstPSN)
}

// Format prints String's text for every verb.
func (s *SubSegment) Format(f fmt.State, verb rune) { printed.Format(f, verb, s.String()) }

// LogValue logs String's text.
func (s *SubSegment) LogValue() slog.Value { return slog.StringValue(s.String()) }

// String says how many there are.
func (t *Segments) String() string {
	if t == nil {
		return "<nil>"
	}
	return fmt.Sprintf("%d segments", t.n)
}

// Format prints String's text for every verb.
func (t *Segments) Format(s fmt.State, verb rune) { printed.Format(s, verb, t.String()) }

// LogValue logs String's text.
func (t *Segments) LogValue() slog.Value { return slog.StringValue(t.String()) }

// String says how much it was given.
func (r *Reassembler) String() string {
	if r == nil {
		return "<nil>"
	}
	return fmt.Sprintf("reassembler of %d packets", r.stats.Packets)
}

// Format prints String's text for every verb.
func (r *Reassembler) Format(s fmt.State, verb rune) { printed.Format(s, verb, r.String()) }

// LogValue logs String's text.
func (r *Reassembler) LogValue() slog.Value { return slog.StringValue(r.String()) }

// String says what was granted, and what either side may send.
func (c Credit) String() string {
	return fmt.Sprintf("%v: %d requested, %d granted, in hand %d and %d", c.Conn, c.Requested, c.Granted, c.InHand[0], c.InHand[1])
}

// Format prints String's text for every verb.
func (c Credit) Format(s fmt.State, verb rune) { printed.Format(s, verb, c.String()) }

// LogValue logs String's text.
func (c Credit) LogValue() slog.Value { return slog.StringValue(c.String()) }

// Format prints String's text for every verb.
func (l Loss) Format(s fmt.State, verb rune) { printed.Format(s, verb, l.String()) }

// LogValue logs String's text.
func (l Loss) LogValue() slog.Value { return slog.StringValue(l.String()) }
