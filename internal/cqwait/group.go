package cqwait

import "sync"

// Group is the goroutines that wait for one kind of event, the readers of a connection for
// instance. The lock that Init was given guards it and must be held for all methods.
type Group struct {
	cond sync.Cond
	n    int // goroutines in Wait

	// one is set if each goroutine of the group leads when it is woken without an event of
	// its own. Otherwise all are woken for one to lead.
	one bool
}

// Init readies the group. everyLeads says that each goroutine in Wait would lead when it is
// woken, so that one wake-up is enough to find the next leader.
func (g *Group) Init(lock sync.Locker, everyLeads bool) { g.cond.L, g.one = lock, everyLeads }

// Wait waits for Wake or WakeAll, and never leads. It lets go of the lock meanwhile.
func (g *Group) Wait() {
	g.n++
	g.cond.Wait()
	g.n--
}

// Wake wakes one goroutine.
func (g *Group) Wake() {
	if g.n > 0 {
		g.cond.Signal()
	}
}

// WakeAll wakes every goroutine.
func (g *Group) WakeAll() {
	if g.n > 0 {
		g.cond.Broadcast()
	}
}

// Waiting returns how many goroutines wait.
func (g *Group) Waiting() int { return g.n }

func (g *Group) handOver() {
	switch {
	case g.n == 0:
	case g.one:
		g.cond.Signal()
	default:
		g.cond.Broadcast()
	}
}
