package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/rdmanet/rdmanet/capture"
)

// summary gathers what -stats prints. It keeps one entry for each connection. For a plot it
// keeps series of bounded length.
type summary struct {
	filter      *filter
	plots       bool
	first, last time.Time
	conns       map[*capture.Conn]*connSummary
	order       []*connSummary
}

// connSummary has the counts and series of one connection.
type connSummary struct {
	c       *capture.Conn
	upper   map[capture.UpperKind]uint64
	bytes   [2]series // bytes has the sum of the payload, by the side that sends it.
	credits [2]series // credits has the lowest number of credits that each side holds.
	low     [2]int
	high    [2]int
	credit  bool
}

func newSummary(f *filter, plots bool) *summary {
	return &summary{filter: f, plots: plots, conns: map[*capture.Conn]*connSummary{}}
}

func (s *summary) packet(p *capture.Packet) {
	if s.first.IsZero() || p.Time.Before(s.first) {
		s.first = p.Time
	}
	if p.Time.After(s.last) {
		s.last = p.Time
	}
}

// of returns the entry of c, nil if it is not to be shown.
func (s *summary) of(c *capture.Conn) *connSummary {
	x, ok := s.conns[c]
	if !ok {
		x = &connSummary{c: c, upper: map[capture.UpperKind]uint64{}}
		s.conns[c] = x
		s.order = append(s.order, x)
	}
	if !s.filter.match(c) {
		return nil
	}
	return x
}

func (s *summary) message(m *capture.Message) {
	x := s.of(m.Conn)
	if x == nil || m.Kind > capture.Datagram {
		return
	}
	from := m.From
	if m.Kind == capture.Read {
		from = from.Other() // The data of a Read is sent by the other side.
	}
	if s.plots {
		x.bytes[from].add(m.End.Sub(s.first), float64(m.Got), false)
	}
}

func (s *summary) upper(u *capture.UpperMessage) {
	if x := s.of(u.Conn); x != nil {
		x.upper[u.Kind]++
	}
}

func (s *summary) credit(k capture.Credit) {
	x := s.of(k.Conn)
	if x == nil || k.Conn.Protocol != capture.SMBDirect {
		return
	}
	for i, n := range k.InHand {
		if s.plots {
			x.credits[i].add(k.Time.Sub(s.first), float64(n), true)
		}
		if !x.credit || n < x.low[i] {
			x.low[i] = n
		}
		if !x.credit || n > x.high[i] {
			x.high[i] = n
		}
	}
	x.credit = true
}

// series has values over time, in intervals that become longer with the series.
type series struct {
	width time.Duration // width is the length of an interval in bins.
	bins  []float64
	set   []bool
}

const maxBins = 1024

func (s *series) add(at time.Duration, v float64, lowest bool) {
	if s.width == 0 {
		s.width = time.Millisecond
	}
	at = max(at, 0)
	for at/s.width >= maxBins { // The quotient may be more than an int holds.
		s.halve(lowest)
	}
	for i := int(at / s.width); len(s.bins) <= i; {
		s.bins, s.set = append(s.bins, 0), append(s.set, false)
	}
	s.put(int(at/s.width), v, lowest)
}

func (s *series) put(i int, v float64, lowest bool) {
	switch {
	case !s.set[i] || lowest && v < s.bins[i]:
		s.bins[i] = v
	case !lowest:
		s.bins[i] += v
	}
	s.set[i] = true
}

// halve joins intervals in pairs.
func (s *series) halve(lowest bool) {
	old := *s
	s.width *= 2
	s.bins, s.set = make([]float64, (len(old.bins)+1)/2), make([]bool, (len(old.bins)+1)/2)
	for i, v := range old.bins {
		if old.set[i] {
			s.put(i/2, v, lowest)
		}
	}
}

// report is the JSON form of the summary.
type report struct {
	Packets     uint64             `json:"packets"`
	Bytes       uint64             `json:"bytes"`
	Seconds     float64            `json:"seconds"`
	RoCE        map[string]uint64  `json:"roce_packets,omitempty"`
	FPDUs       map[string]uint64  `json:"fpdus,omitempty"`
	Connections []connectionReport `json:"connections"`
	Losses      []string           `json:"losses,omitempty"`
}

type connectionReport struct {
	ID        int               `json:"id"`
	Transport string            `json:"transport"`
	Protocol  string            `json:"protocol"`
	MTU       int               `json:"mtu,omitempty"`
	Unpaired  bool              `json:"unpaired,omitempty"` // Unpaired is that of capture.Conn.
	Upper     map[string]uint64 `json:"upper,omitempty"`
	Sides     [2]sideReport     `json:"sides"`
}

type sideReport struct {
	End      string            `json:"end"`
	Packets  uint64            `json:"packets"`
	Payload  uint64            `json:"payload"`
	Messages map[string]uint64 `json:"messages"`
	Partial  uint64            `json:"not_complete"`
	Repeats  uint64            `json:"repeats"`
	Early    uint64            `json:"out_of_order"`
	Lost     uint64            `json:"lost"`
	NAKs     uint64            `json:"naks"`
	RNRs     uint64            `json:"rnr_naks"`
	Marked   uint64            `json:"congestion_marks"`
	Latency  *latencyReport    `json:"latency,omitempty"`
	Credits  *[2]int           `json:"credits,omitempty"` // Credits is the least and the greatest number of credits that the side held.
}

type latencyReport struct {
	Count uint64  `json:"count"`
	Min   float64 `json:"min_us"`
	Mean  float64 `json:"mean_us"`
	P50   float64 `json:"p50_us"` // P50 and P99 are precise to a factor of two.
	P99   float64 `json:"p99_us"`
	Max   float64 `json:"max_us"`
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

func (s *summary) report(st *capture.Stats, lost *losses) *report {
	r := &report{Packets: st.Packets, Bytes: st.Bytes, Seconds: s.last.Sub(s.first).Seconds(),
		RoCE: map[string]uint64{}, FPDUs: map[string]uint64{}, Losses: lost.lines(st), Connections: []connectionReport{}}
	for op, n := range st.Opcodes {
		if n > 0 {
			r.RoCE[capture.Opcode(op).String()] = n
		}
	}
	for op, n := range st.FPDUs {
		if n > 0 {
			r.FPDUs[capture.FPDUName(op)] = n
		}
	}
	slices.SortFunc(s.order, func(a, b *connSummary) int { return a.c.ID - b.c.ID })
	for _, x := range s.order {
		if !s.filter.match(x.c) {
			continue
		}
		c := x.c
		k := connectionReport{ID: c.ID, Transport: c.Transport.String(), Protocol: c.Protocol.String(), MTU: c.MTU, Unpaired: c.Unpaired, Upper: map[string]uint64{}}
		for kind, n := range x.upper {
			k.Upper[kind.String()] = n
		}
		for i := range k.Sides {
			n := &c.Sent[i]
			d := sideReport{End: end(c, capture.Side(i)), Packets: n.Packets, Payload: n.Payload, Messages: map[string]uint64{},
				Partial: n.Partial, Repeats: n.Repeats, Early: n.Reordered, Lost: n.Lost, NAKs: n.NAKs, RNRs: n.RNRs, Marked: n.Marked}
			for kind, count := range n.Messages {
				if count > 0 {
					d.Messages[capture.Kind(kind).String()] = count
				}
			}
			if l := &n.Latency; l.Count > 0 {
				d.Latency = &latencyReport{l.Count, micros(l.Min), micros(l.Mean()), micros(l.Quantile(0.5)), micros(l.Quantile(0.99)), micros(l.Max)}
			}
			if x.credit {
				d.Credits = &[2]int{x.low[i], x.high[i]}
			}
			k.Sides[i] = d
		}
		r.Connections = append(r.Connections, k)
	}
	return r
}

func (s *summary) print(w io.Writer, o *options, st *capture.Stats, lost *losses) error {
	r := s.report(st, lost)
	var err error
	if o.plot != "" {
		err = os.WriteFile(o.plot, s.plot(), 0o666)
	}
	if o.json {
		return errors.Join(err, json.NewEncoder(w).Encode(r))
	}
	fmt.Fprintf(w, "%d packets, %d bytes, %.3f s\n", r.Packets, r.Bytes, r.Seconds)
	for _, x := range []struct {
		title  string
		counts map[string]uint64
	}{{"RoCEv2 packets", r.RoCE}, {"FPDUs", r.FPDUs}} {
		if len(x.counts) > 0 {
			fmt.Fprintf(w, "%s: %s\n", x.title, list(x.counts))
		}
	}
	for _, c := range r.Connections {
		fmt.Fprintf(w, "\n#%d %s, %s", c.ID, c.Transport, c.Protocol)
		if c.MTU > 0 {
			fmt.Fprintf(w, ", MTU %d", c.MTU)
		}
		if c.Unpaired {
			fmt.Fprint(w, ", unpaired: one direction alone, and its Reads have no answers")
		}
		fmt.Fprintln(w)
		if len(c.Upper) > 0 {
			fmt.Fprintf(w, "  upper layer: %s\n", list(c.Upper))
		}
		for i, d := range c.Sides {
			fmt.Fprintf(w, "  %s (%s)\n", d.End, [2]string{"initiator", "responder"}[i])
			fmt.Fprintf(w, "    sent %d packets; %s; %d bytes of payload", d.Packets, list(d.Messages), d.Payload)
			if r.Seconds > 0 {
				fmt.Fprintf(w, ", %.3f MB/s", float64(d.Payload)/1e6/r.Seconds)
			}
			fmt.Fprintln(w)
			fmt.Fprintf(w, "    not complete %d, repeated %d, out of order %d, lost %d, NAK %d, RNR NAK %d, congestion %d\n",
				d.Partial, d.Repeats, d.Early, d.Lost, d.NAKs, d.RNRs, d.Marked)
			if l := d.Latency; l != nil {
				fmt.Fprintf(w, "    latency of %d: min %.1f, mean %.1f, median below %.1f, 99 %% below %.1f, max %.1f µs\n",
					l.Count, l.Min, l.Mean, l.P50, l.P99, l.Max)
			}
			if d.Credits != nil {
				fmt.Fprintf(w, "    credits in hand: %d to %d\n", d.Credits[0], d.Credits[1])
			}
		}
	}
	for i, l := range r.Losses {
		if i == 0 {
			fmt.Fprintln(w, "\nMissing or useless:")
		}
		fmt.Fprintf(w, "  %s\n", l)
	}
	return err
}

// list writes counts in the order of their names.
func list(counts map[string]uint64) string {
	var names []string
	for name := range counts {
		names = append(names, name)
	}
	slices.Sort(names)
	var parts []string
	for _, name := range names {
		parts = append(parts, fmt.Sprintf("%s %d", name, counts[name]))
	}
	if parts == nil {
		return "no messages"
	}
	return strings.Join(parts, ", ")
}
