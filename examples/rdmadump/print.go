package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/rdmanet/rdmanet/capture"
)

// printer prints a line for each message.
type printer struct {
	w      io.Writer
	filter *filter
	json   bool
	begun  time.Time // begun is the time of the first packet.
}

// line describes a message. The JSON form has all fields.
type line struct {
	Time     time.Time `json:"time"`
	Seconds  float64   `json:"-"`
	Conn     int       `json:"conn,omitempty"`
	From     string    `json:"from,omitempty"`
	To       string    `json:"to,omitempty"`
	Kind     string    `json:"kind"`
	Protocol string    `json:"protocol,omitempty"`
	Size     uint64    `json:"size"`
	Got      uint64    `json:"got"`
	Packets  int       `json:"packets,omitempty"`
	Sends    int       `json:"sends,omitempty"`
	Duration float64   `json:"duration"` // Duration is in seconds.
	Key      string    `json:"key,omitempty"`
	Addr     string    `json:"addr,omitempty"`
	Detail   string    `json:"detail,omitempty"`
	Transfer *transfer `json:"transfer,omitempty"`
	Complete bool      `json:"complete"`
	Missing  string    `json:"missing,omitempty"`
}

// transfer describes a message of one of rdmanet's large transfers.
type transfer struct {
	Op        string `json:"op"` // Op is the operation of the Send.
	ID        uint64 `json:"id"`
	Length    uint32 `json:"length"` // Length is the length that the Send gives.
	Offset    uint64 `json:"offset"` // Offset is the place in the transfer at which Size begins.
	Rest      uint64 `json:"rest"`   // Rest is how many bytes of the message follow.
	Withdrawn bool   `json:"withdrawn,omitempty"`
	Cut       bool   `json:"cut,omitempty"`
}

// transferFlag is set in Flags of every Send that has an Op.
const transferFlag = 0x4000

// lossKind is the kind of a line that reports what is missing from the capture.
const lossKind = "LOSS"

// since returns the seconds from the first packet on.
func (p *printer) since(t time.Time) float64 { return t.Sub(p.begun).Seconds() }

func (p *printer) print(l *line) {
	if p.json {
		if y := l.Time.Year(); y < 0 || y > 9999 {
			l.Time = time.Time{} // JSON has no form for it
		}
		b, err := json.Marshal(l)
		if err == nil {
			p.w.Write(append(b, '\n'))
		}
		return
	}
	fmt.Fprintf(p.w, "%12.6f  #%-3d %s > %s  %s", l.Seconds, l.Conn, l.From, l.To, l.Kind)
	if l.Size > 0 || l.Got > 0 {
		fmt.Fprintf(p.w, " %d bytes", l.Size)
	}
	if l.Key != "" {
		fmt.Fprintf(p.w, ", key %s at %s", l.Key, l.Addr)
	}
	if l.Detail != "" {
		fmt.Fprintf(p.w, ", %s", l.Detail)
	}
	switch {
	case l.Complete:
		fmt.Fprintln(p.w, ", complete")
	case l.Kind == lossKind:
		fmt.Fprintf(p.w, ": %s\n", l.Missing)
	default:
		fmt.Fprintf(p.w, ", NOT COMPLETE: %s\n", l.Missing)
	}
}

// end names an end of a connection.
func end(c *capture.Conn, side capture.Side) string {
	e := &c.Ends[side]
	s := e.Addr.Addr().String()
	if e.Addr.Port() != 0 {
		s = e.Addr.String()
	}
	if c.Transport == capture.RoCE2 && e.QP != 0 {
		s += fmt.Sprintf(" QP 0x%x", e.QP)
	}
	return s
}

// gaps describes the first few ranges that are missing.
func gaps(missing []capture.Range, size, got uint64, head, tail bool) string {
	var parts []string
	if head {
		parts = append(parts, "the beginning")
	}
	for i, g := range missing {
		if i == 4 {
			parts = append(parts, fmt.Sprintf("%d more gaps", len(missing)-i))
			break
		}
		parts = append(parts, g.String())
	}
	if tail {
		parts = append(parts, "the end")
	}
	if len(parts) == 0 {
		return fmt.Sprintf("%d of %d bytes can be used", got, size)
	}
	return fmt.Sprintf("%s missing, %d of %d bytes there", strings.Join(parts, ", "), got, size)
}

func (p *printer) message(m *capture.Message) {
	c := m.Conn
	if !p.filter.match(c) {
		return
	}
	l := line{Time: m.Time, Seconds: p.since(m.Time), Conn: c.ID, From: end(c, m.From), To: end(c, m.From.Other()),
		Kind: m.Kind.String(), Size: m.Size, Got: m.Got, Packets: m.Packets, Duration: m.End.Sub(m.Time).Seconds(), Complete: m.Complete}
	var detail []string
	say := func(format string, args ...any) { detail = append(detail, fmt.Sprintf(format, args...)) }
	switch m.Kind {
	case capture.Write, capture.Read, capture.CompareSwap, capture.FetchAdd:
		l.Key, l.Addr = fmt.Sprintf("0x%08x", m.Key), fmt.Sprintf("0x%x", m.Addr)
		if c.Unpaired && m.Kind != capture.Write {
			say("QP unpaired")
		}
	case capture.Management:
		l.Kind = m.CM.Attribute.String()
		if m.CM.Reason != 0 {
			say("reason %d", m.CM.Reason)
		}
	case capture.Terminate:
		if m.Reason != nil {
			say("%v", m.Reason)
		}
	case capture.Datagram:
		say("from QP 0x%x", m.SrcQP)
	}
	switch m.Kind {
	case capture.CompareSwap:
		say("compare 0x%x, swap 0x%x, was 0x%x", m.Compare, m.Operand, m.Original)
	case capture.FetchAdd:
		say("add 0x%x, was 0x%x", m.Operand, m.Original)
	}
	if m.HasImm {
		say("immediate 0x%08x", m.Imm)
	}
	if m.HasInvalidate {
		say("invalidates 0x%08x", m.Invalidate)
	}
	if m.Packets > 1 {
		say("%d packets in %v", m.Packets, m.End.Sub(m.Time))
	}
	if l.Detail = strings.Join(detail, ", "); !m.Complete {
		l.Missing = gaps(m.Missing, m.Size, m.Got, m.HeadLost, m.TailLost)
	}
	p.print(&l)
}

func (p *printer) upper(u *capture.UpperMessage) {
	c := u.Conn
	if !p.filter.match(c) {
		return
	}
	l := line{Time: u.Time, Seconds: p.since(u.Time), Conn: c.ID, From: end(c, u.From), To: end(c, u.From.Other()),
		Kind: u.Protocol.String() + " " + u.Kind.String(), Protocol: u.Protocol.String(), Size: u.Size, Got: u.Got,
		Sends: u.Sends, Duration: u.End.Sub(u.Time).Seconds(), Complete: u.Complete}
	var detail []string
	say := func(format string, args ...any) { detail = append(detail, fmt.Sprintf(format, args...)) }
	if u.Op == capture.Offer || u.Op == capture.Grant {
		l.Key, l.Addr = fmt.Sprintf("0x%08x", u.Memory.Handle), fmt.Sprintf("0x%x", u.Memory.Offset)
	}
	if u.Protocol == capture.RPCRDMA {
		say("XID 0x%08x", u.XID)
	}
	switch {
	case u.Op != 0:
		l.Transfer = &transfer{u.Op.String(), u.ID, u.Memory.Length, u.Offset, u.Rest, u.Withdrawn, u.Cut}
		sayTransfer(u, say)
	case u.Kind == capture.Transfer:
		say("SMB2 message %d, at %d of the file", u.ID, u.Offset)
	}
	if u.Sends > 1 {
		say("%d Sends", u.Sends)
	}
	for _, k := range u.ReadChunks {
		say("read chunk of %d at %d", k.Size, k.Position)
	}
	for _, k := range u.Writes {
		say("write chunk of %d in %d segments", k.Size, len(k.Segments))
	}
	if k := u.ReplyChunk; k != nil {
		say("reply chunk of %d in %d segments", k.Size, len(k.Segments))
	}
	flags := u.Flags
	if u.Op != 0 {
		flags &^= transferFlag
	}
	if flags != 0 {
		say("flags 0x%04x", flags)
	}
	if l.Detail = strings.Join(detail, ", "); !u.Complete {
		l.Missing = gaps(u.Missing, u.Size, u.Got, u.HeadLost, u.TailLost)
	}
	p.print(&l)
}

// sayTransfer describes a message of one of rdmanet's large transfers in words.
func sayTransfer(u *capture.UpperMessage, say func(format string, args ...any)) {
	way := "RDMA Read"
	if u.Op == capture.Request {
		way = "RDMA Write"
	}
	switch u.Kind {
	case capture.Control:
		say("%v of transfer %d", u.Op, u.ID)
		if u.Op != capture.Withdraw {
			say("%d bytes", u.Memory.Length)
		}
	case capture.Transfer:
		say("transfer %d by %s", u.ID, way)
		if u.Offset > 0 {
			say("from its byte %d on", u.Offset)
		}
	}
	if u.Rest > 0 {
		say("%d more of the message", u.Rest)
	}
	switch {
	case u.Cut:
		say("withdrawn, and the message cut")
	case u.Withdrawn:
		say("withdrawn")
	}
}

func (p *printer) loss(x capture.Loss) {
	l := line{Time: x.Time, Seconds: p.since(x.Time), Kind: lossKind, Missing: x.String()}
	if c := x.Conn; c != nil {
		if !p.filter.match(c) {
			return
		}
		l.Conn, l.From, l.To = c.ID, end(c, x.From), end(c, x.From.Other())
	}
	p.print(&l)
}
