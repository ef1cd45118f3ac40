package rdmanet

import "time"

// pace bounds how many bytes of transfers a receiver has asked for and not received. A call
// whose deadline passes must wait for those bytes, because the device uses the call's
// memory, and a keep-alive probe queues behind them. A fixed number of bytes would be too
// few for a fast link, or take many seconds on a slow one.
//
// So the budget follows the link. The bytes of a connection arrive in the order in which
// they were asked for. When a fetch has arrived, everything that was under way when it was
// asked for has arrived too. These bytes, divided by the time of the fetch, are the rate of
// the link. The budget is what the link carries at that rate in the shortest time of a
// fetch plus paceSlack. With so many bytes asked for the link is never idle, and the queue
// in front of it is paceSlack long. This is a bandwidth-delay product as TCP's BBR
// estimates it. The requests of RDMA Reads, or memory grants, take the place of segments.
//
// The budget starts at paceStart, and doubles with each round trip as long as the link
// keeps up, as in slow start. It lives as long as the connection.
type pace struct {
	budget   int           // budget is how many bytes may be under way.
	most     int           // most is the largest budget.
	parts    int           // parts is how many fetches share the budget, at most.
	under    int           // under is how many bytes are under way.
	settled  bool          // settled is set when the limit of the link has been reached.
	shortest time.Duration // shortest is the time of the fastest fetch since baseline.
	baseline time.Time     // baseline is when shortest was measured.
	stale    bool          // stale is set when shortest is too old to be used.

	// alone is set while the fetch is under way that measures shortest anew. It was asked
	// for when no other was under way.
	alone bool
}

const (
	// fetchSize is the greatest number of bytes of one RDMA Read, and of a Read's memory
	// that is registered at a time.
	fetchSize = 4 << 20

	// paceLeast is the least length of a fetch in bytes, except at the end of a transfer.
	paceLeast = 8 << 10

	// paceParts is how many fetches share a budget at most. On a long path, all but one of
	// them are on their way.
	paceParts = 8

	// paceUnit is what the length of a fetch is a multiple of, except at the end of a
	// transfer. It is the size of a cache line in bytes.
	paceUnit = 64

	// paceLife is how long shortest stands for the delay of the link. A path may become
	// longer, which a minimum would never show.
	paceLife = 10 * time.Second
)

// paceStart is the first budget in bytes, and paceSlack the time by which a budget exceeds
// the delay of the link.
//
// A Write that gives up waits for two budgets: one that is in front of its withdrawal, and
// one that was asked for meanwhile. At 1 MB/s these take some 120 ms. A shorter slack would
// cost throughput if a busy processor notices completions late.
var (
	paceStart = 64 << 10
	paceSlack = 50 * time.Millisecond
)

// newPace returns the pace of a connection that may have so many fetches under way.
func newPace(fetches int) pace {
	most := fetches * fetchSize
	return pace{budget: min(paceStart, most), most: most, parts: min(fetches, paceParts)}
}

// next returns how many bytes the next fetch may have, or 0 if none may be asked for now.
//
// When the delay is to be measured anew, next waits until nothing is under way. Then it
// lets a short fetch go first. That costs the link one delay every paceLife. It is not done
// with the largest budget, for which the delay makes no difference.
func (p *pace) next() int {
	parts := max(1, min(p.budget/paceLeast, p.parts))
	n := min(max(p.budget/parts/paceUnit*paceUnit, paceLeast), fetchSize)
	switch {
	case p.under == 0 && p.stale:
		return paceLeast
	case p.under == 0:
		return n
	// A fetch may go if half of it fits, because those under way may be longer than this
	// one.
	case p.stale && !p.alone && p.budget < p.most, p.under+n/2 > p.budget:
		return 0
	}
	return n
}

// ask notes that n bytes are asked for, and returns how many bytes are under way with
// these.
func (p *pace) ask(n int) (under int) {
	p.alone = p.alone || p.stale && p.under == 0
	p.under += n
	return p.under
}

// drop notes that n bytes that were asked for will not arrive.
func (p *pace) drop(n int) {
	p.under -= n
	p.alone = false
}

// arrived notes that n bytes have arrived. They were asked for at the given time, when under
// bytes were under way with these.
func (p *pace) arrived(n, under int, at, now time.Time) {
	p.under -= n
	took := max(now.Sub(at), time.Microsecond)
	switch {
	case p.shortest == 0, took <= p.shortest, p.alone && under == n:
		p.shortest, p.baseline, p.stale, p.alone = took, now, false, false
	case now.Sub(p.baseline) > paceLife:
		p.stale = true
	}
	target := p.shortest + paceSlack
	fits := int(min(float64(under)*float64(target)/float64(took), float64(p.most)))
	switch {
	case fits > p.budget && p.settled:
		p.budget = min(fits, p.budget+n/2)
	case fits > p.budget:
		p.budget = min(fits, p.budget+2*n)
	// The link is slower than the budget assumes. A fetch within the target time shows
	// nothing, because too few bytes were asked for.
	case took > target:
		p.budget = max(fits, p.budget/2, min(2*paceLeast, p.most))
		p.settled = true
	}
}
