package twin

import (
	"fmt"
	"strings"
	"time"
)

// GoString returns the program as Go code, for a test that calls play with it.
func (p *Program) GoString() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Program{\n\tSeed: %#x,\n", p.Seed)
	if p.Peer != Rdmanet {
		fmt.Fprintf(&b, "\tPeer: %v,\n", p.Peer)
	}
	if p.Swap {
		b.WriteString("\tSwap: true,\n")
	}
	if p.Apart {
		b.WriteString("\tApart: true,\n")
	}
	if len(p.Suspends) > 0 {
		var list []string
		for _, s := range p.Suspends {
			var f fields
			f.duration("At", s.At)
			f.duration("For", s.For)
			list = append(list, "{"+f.String()+"}")
		}
		b.WriteString("\tSuspends: []Span{" + strings.Join(list, ", ") + "},\n")
	}
	if !p.Link.direct() {
		b.WriteString("\tLink: Link{")
		var f fields
		f.duration("Delay", p.Link.Delay)
		f.number("Rate", int64(p.Link.Rate))
		if len(p.Link.Faults) > 0 {
			var list []string
			for _, x := range p.Link.Faults {
				g := fields{"Do: " + x.Do.String()}
				g.duration("At", x.At)
				g.number("Bytes", x.Bytes)
				g.duration("For", x.For)
				list = append(list, "{"+g.String()+"}")
			}
			f = append(f, "Faults: []Fault{"+strings.Join(list, ", ")+"}")
		}
		b.WriteString(f.String() + "},\n")
	}
	printEnd(&b, "First", &p.First)
	printEnd(&b, "Other", &p.Other)
	b.WriteString("}")
	return b.String()
}

func printEnd(b *strings.Builder, name string, e *End) {
	fmt.Fprintf(b, "\t%s: End{\n", name)
	if e.Setup != (Setup{}) {
		var f fields
		f.number("TransferSize", int64(e.Setup.TransferSize))
		if e.Setup.NoRDMARead {
			f = append(f, "NoRDMARead: true")
		}
		f.number("MaxSegment", int64(e.Setup.MaxSegment))
		f.number("MaxFragmentedSize", int64(e.Setup.MaxFragmentedSize))
		f.number("InitialCredits", int64(e.Setup.InitialCredits))
		f.number("MaxCredits", int64(e.Setup.MaxCredits))
		f.number("TransferMemory", int64(e.Setup.TransferMemory))
		f.duration("KeepAlive", e.Setup.KeepAlive)
		f.duration("Linger", e.Setup.Linger)
		fmt.Fprintf(b, "\t\tSetup: Setup{%v},\n", f)
	}
	printLane(b, "Writing", e.Writing)
	printLane(b, "Reading", e.Reading)
	printLane(b, "Control", e.Control)
	b.WriteString("\t},\n")
}

func printLane(b *strings.Builder, name string, ops []Op) {
	if len(ops) == 0 {
		return
	}
	fmt.Fprintf(b, "\t\t%s: []Op{\n", name)
	for _, op := range ops {
		fmt.Fprintf(b, "\t\t\t{%v},\n", op)
	}
	b.WriteString("\t\t},\n")
}

// String returns the operation as the inside of a composite literal.
func (op Op) String() string {
	f := fields{"Do: " + op.Do.String()}
	f.number("Size", int64(op.Size))
	f.number("Part", int64(op.Part))
	f.duration("Wait", op.Wait)
	if op.Memory != Heap {
		f = append(f, "Memory: "+op.Memory.String())
	}
	return f.String()
}

// fields is a list of fields of a composite literal.
type fields []string

func (f *fields) number(name string, n int64) {
	if n != 0 {
		*f = append(*f, fmt.Sprintf("%s: %d", name, n))
	}
}

func (f *fields) duration(name string, d time.Duration) {
	if d == 0 {
		return
	}
	unit, name2 := time.Nanosecond, "time.Nanosecond"
	switch {
	case d%time.Second == 0:
		unit, name2 = time.Second, "time.Second"
	case d%time.Millisecond == 0:
		unit, name2 = time.Millisecond, "time.Millisecond"
	case d%time.Microsecond == 0:
		unit, name2 = time.Microsecond, "time.Microsecond"
	}
	*f = append(*f, fmt.Sprintf("%s: %d * %s", name, d/unit, name2))
}

func (f fields) String() string { return strings.Join(f, ", ") }
