package rdmanet

import (
	"fmt"
	"log/slog"

	"github.com/rdmanet/rdmanet/internal/printed"
)

// This file prints the package's values as one short line, for package fmt and for log/slog.
// Values with payload in their fields, or with fields that change while they are read, print
// so for every verb of fmt. No method here takes a lock, so a value can be logged anywhere.

// String returns the addresses of the two ends and the name of the device.
func (c *Conn) String() string {
	if c == nil {
		return "<nil>"
	}
	return c.conn.description()
}

func (c *conn) description() string {
	if c == nil || c.lane.id == nil {
		return "rdmanet: no connection"
	}
	return fmt.Sprintf("rdmanet: %v to %v on %s", c.local, c.remote, c.lane.id.Device().Name())
}

// Format prints String's text for every verb.
func (c *Conn) Format(s fmt.State, verb rune) { printed.Format(s, verb, c.String()) }

// LogValue logs String's text.
func (c *Conn) LogValue() slog.Value { return slog.StringValue(c.String()) }

// String returns the address.
func (l *Listener) String() string {
	switch {
	case l == nil:
		return "<nil>"
	case l.listener == nil:
		return "rdmanet: no listener"
	}
	return fmt.Sprintf("rdmanet: listener on %v", l.addr)
}

// Format prints String's text for every verb.
func (l *Listener) Format(s fmt.State, verb rune) { printed.Format(s, verb, l.String()) }

// LogValue logs String's text.
func (l *Listener) LogValue() slog.Value { return slog.StringValue(l.String()) }

// String returns the local address, and the peer's if the PacketConn is connected.
func (p *PacketConn) String() string {
	switch {
	case p == nil:
		return "<nil>"
	case p.conn == nil:
		return "rdmanet: no packet connection"
	case !p.conn.Connected():
		return fmt.Sprintf("rdmanet: datagrams at %v", p.LocalAddr())
	}
	return fmt.Sprintf("rdmanet: datagrams from %v to %v", p.LocalAddr(), p.RemoteAddr())
}

// Format prints String's text for every verb.
func (p *PacketConn) Format(s fmt.State, verb rune) { printed.Format(s, verb, p.String()) }

// LogValue logs String's text.
func (p *PacketConn) LogValue() slog.Value { return slog.StringValue(p.String()) }

// String returns the length of the memory.
func (b *Buffer) String() string {
	if b == nil {
		return "<nil>"
	}
	return fmt.Sprintf("rdmanet: Buffer of %d bytes", b.mem.Len())
}

// Format prints String's text for every verb.
func (b *Buffer) Format(s fmt.State, verb rune) { printed.Format(s, verb, b.String()) }

// LogValue logs String's text.
func (b *Buffer) LogValue() slog.Value { return slog.StringValue(b.String()) }

// String returns the length of the message, and the connection that sends it.
func (s *PendingMessage) String() string {
	switch {
	case s == nil:
		return "<nil>"
	case s.c == nil:
		return "rdmanet: no message"
	}
	return fmt.Sprintf("rdmanet: message of %d bytes, %s", s.size, s.c.description())
}

// Format prints String's text for every verb.
func (s *PendingMessage) Format(f fmt.State, verb rune) { printed.Format(f, verb, s.String()) }

// LogValue logs String's text.
func (s *PendingMessage) LogValue() slog.Value { return slog.StringValue(s.String()) }

// String returns the length of Buf, how many bytes of it were received, and the address.
func (d Datagram) String() string {
	if !d.Addr.IsValid() {
		return fmt.Sprintf("rdmanet: datagram, %d of %d bytes", d.N, len(d.Buf))
	}
	return fmt.Sprintf("rdmanet: datagram, %d of %d bytes, %v", d.N, len(d.Buf), d.Addr)
}

// Format prints String's text for every verb.
func (d Datagram) Format(s fmt.State, verb rune) { printed.Format(s, verb, d.String()) }

// LogValue logs String's text.
func (d Datagram) LogValue() slog.Value { return slog.StringValue(d.String()) }

// String lists the fields that are not zero.
func (c Config) String() string { return printed.Struct(c) }

// LogValue logs the fields that are not zero.
func (c Config) LogValue() slog.Value { return printed.LogStruct(c) }

// String lists the fields that are not zero.
func (d Dialer) String() string { return printed.Struct(d) }

// LogValue logs the fields that are not zero.
func (d Dialer) LogValue() slog.Value { return printed.LogStruct(d) }

// String lists the fields that are not zero.
func (lc ListenConfig) String() string { return printed.Struct(lc) }

// LogValue logs the fields that are not zero.
func (lc ListenConfig) LogValue() slog.Value { return printed.LogStruct(lc) }

// String lists the fields that are not zero.
func (s Stats) String() string { return printed.Struct(s) }

// LogValue logs the fields that are not zero.
func (s Stats) LogValue() slog.Value { return printed.LogStruct(s) }

// String lists the fields that are not zero.
func (s LingerStats) String() string { return printed.Struct(s) }

// LogValue logs the fields that are not zero.
func (s LingerStats) LogValue() slog.Value { return printed.LogStruct(s) }

// String lists the fields that are not zero.
func (s PacketStats) String() string { return printed.Struct(s) }

// LogValue logs the fields that are not zero.
func (s PacketStats) LogValue() slog.Value { return printed.LogStruct(s) }

// String lists the fields that are not zero.
func (i Info) String() string { return printed.Struct(i) }

// LogValue logs the fields that are not zero.
func (i Info) LogValue() slog.Value { return printed.LogStruct(i) }

// String lists the fields that are not zero.
func (i PacketInfo) String() string { return printed.Struct(i) }

// LogValue logs the fields that are not zero.
func (i PacketInfo) LogValue() slog.Value { return printed.LogStruct(i) }

// String names the flags.
func (f MsgFlags) String() string {
	return printed.Flags(uint64(f), "Expedited", "Partial", "NoResponse", "NonBlocking")
}

// LogValue logs String's text.
func (f MsgFlags) LogValue() slog.Value { return slog.StringValue(f.String()) }

// String names the key.
func (i invalidation) String() string { return fmt.Sprintf("Invalidate(%#x)", uint32(i)) }

// LogValue logs String's text.
func (i invalidation) LogValue() slog.Value { return slog.StringValue(i.String()) }

// LogValue logs String's text.
func (e Extensions) LogValue() slog.Value { return slog.StringValue(e.String()) }

// LogValue logs String's text.
func (m TransferMode) LogValue() slog.Value { return slog.StringValue(m.String()) }
