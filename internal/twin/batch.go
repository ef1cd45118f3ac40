package twin

import (
	"fmt"
	"strings"
)

// A Finding is a program that does not do what the contract permits.
type Finding struct {
	Seed       uint64
	Program    *Program
	Violations []Violation
	Trace      *Trace
}

// String describes the finding, with the program as Go code.
func (f *Finding) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d over %s:\n", f.Seed, f.Trace.Network)
	for _, v := range f.Violations {
		fmt.Fprintf(&b, "  %v\n", v)
	}
	fmt.Fprintf(&b, "%#v\n", f.Program)
	fmt.Fprintf(&b, "goroutines ran up to %.1f ms late\n", ms(f.Trace.Noise))
	for _, e := range f.Trace.Link {
		fmt.Fprintf(&b, "%7.1f ms  the link: %v %v\n", ms(e.When), e.Do, e.For)
	}
	for i, c := range f.Trace.Calls {
		if i == 200 {
			fmt.Fprintf(&b, "and %d calls more\n", len(f.Trace.Calls)-i)
			break
		}
		fmt.Fprintf(&b, "%v\n", c)
	}
	return b.String()
}

// A Checker runs programs and looks for findings.
type Checker struct{ *Machine }

// Confirm reports whether a finding counts. A wrong result counts at once. A finding about
// time counts if it occurs in two of three runs. Confirm makes two of these, with nothing
// beside them, because a busy machine is slow now and then.
func (c *Checker) Confirm(f *Finding) *Finding {
	if f == nil || !f.timing() {
		return f
	}
	for range 2 {
		if g := c.Check(f.Program); g != nil && (!g.timing() || g.sharesRule(f)) {
			return g
		}
	}
	return nil
}

// timing reports whether the finding is about time only.
func (f *Finding) timing() bool {
	for _, v := range f.Violations {
		if !v.Timing {
			return false
		}
	}
	return true
}

// sharesRule reports whether f breaks the rule that g breaks. If g breaks rules that are
// not about time, one of those counts.
func (f *Finding) sharesRule(g *Finding) bool {
	main := g.Violations[0]
	for _, v := range g.Violations {
		if !v.Timing {
			main = v
			break
		}
	}
	for _, v := range f.Violations {
		if v.Rule == main.Rule {
			return true
		}
	}
	return false
}

// Check runs a program over both networks. The finding is nil if there is none.
func (c *Checker) Check(p *Program) *Finding {
	var tcp *Trace
	if p.Peer != Breaking {
		tcp = Run(c.Machine, p, "tcp")
		if vs := Judge(p, tcp); len(vs) > 0 {
			return &Finding{p.Seed, p, vs, tcp}
		}
		if tcp.GaveUp > 0 && p.ahead() {
			return nil // TCP has no room for what the program writes.
		}
	}
	rdma := Run(c.Machine, p, "rdma")
	vs := Judge(p, rdma)
	if tcp != nil {
		vs = append(vs, Compare(p, tcp, rdma)...)
	}
	if len(vs) > 0 {
		return &Finding{p.Seed, p, vs, rdma}
	}
	return nil
}

// Reduce shrinks the program of a finding. A program that fails only now and then is tried
// more often.
func (c *Checker) Reduce(f *Finding, attempts int) *Finding {
	best := f
	hits, tries := 0, 0
	same := func(p *Program) bool {
		g := c.Check(p)
		if g == nil || !g.sharesRule(f) || g.Trace.Network != f.Trace.Network {
			return false
		}
		best = g
		return true
	}
	for ; tries < 12 && hits < 2; tries++ {
		if same(f.Program) {
			hits++
		}
	}
	if hits == 0 {
		return f
	}
	each := min(12, 1+2*tries/hits)
	if tries == hits {
		each = 1
	}
	shrunk := Shrink(f.Program, attempts, func(p *Program) bool {
		for range each {
			if same(p) {
				return true
			}
		}
		return false
	})
	best.Program = shrunk
	return best
}
