package rdmanet

import "time"

// pace bounds the bytes of large transfers that a receiver has asked for and that have
// not come yet. A call whose deadline passes must wait for them, since the device is at
// work on its memory, and a keep-alive probe queues behind them. A fixed number of bytes
// would be too few for a fast link or take a slow one many seconds.
//
// So the budget follows the link. The bytes of a connection arrive in the order in which
// they were asked for: when a fetch lands, everything that was under way when it was
// asked for has landed too. Bytes divided by time is what the link delivers, and the
// budget is what it delivers in the shortest time that a fetch takes plus paceSlack. The
// link is never idle with that much asked for, and the queue in front of it is paceSlack
// long. This is a bandwidth-delay product as TCP's BBR estimates it, with the requests
// of RDMA Reads, or grants, in place of segments.
//
// The estimate starts small, at paceStart, and doubles with each round trip as slow start
// does, as long as the link keeps up. It lives as long as the connection.
type pace struct {
	budget   int           // bytes that may be under way
	most     int           // the largest budget
	parts    int           // fetches that share the budget
	under    int           // bytes under way
	settled  bool          // the link's limit has been met
	shortest time.Duration // the time of the fastest fetch since baseline
	baseline time.Time
	stale    bool // shortest is too old to go by
	alone    bool // the fetch that measures it anew is under way, with others behind it
}

const (
	// fetchSize is the most bytes of one RDMA Read, and of a reader's memory that is
	// registered at a time.
	fetchSize = 4 << 20

	paceLeast = 8 << 10 // bytes of a fetch
	paceParts = 8       // fetches at a time at most: all but one are on their way for the length of a long path
	paceUnit  = 64      // fetches are multiples of a cache line, but at the end of a transfer

	// paceLife is how long the fastest fetch stands for the link's delay. A path may
	// become longer, which a minimum would never show.
	paceLife = 10 * time.Second
)

// paceStart is the first budget in bytes, and paceSlack the time by which a budget exceeds
// the link's delay. A Write that gives up waits for two budgets, one that is in front of
// its withdrawal and one that was asked for meanwhile: at 1 MB/s these take some 120 ms.
// A shorter slack would cost throughput where a busy processor notices completions late.
var (
	paceStart = 64 << 10
	paceSlack = 50 * time.Millisecond
)

// newPace returns the pace of a connection that may have that many fetches under way.
func newPace(fetches int) pace {
	most := fetches * fetchSize
	return pace{budget: min(paceStart, most), most: most, parts: min(fetches, paceParts)}
}

// next returns how many bytes the next fetch may have, 0 if none may be asked for now.
// When the delay is to be measured anew, what is under way lands first, and a short fetch
// is asked for ahead of all others. That costs the link one delay every paceLife. With the
// largest budget the delay makes no difference.
func (p *pace) next() int {
	parts := max(1, min(p.budget/paceLeast, p.parts))
	n := min(max(p.budget/parts/paceUnit*paceUnit, paceLeast), fetchSize)
	switch {
	case p.under == 0 && p.stale:
		return paceLeast
	case p.under == 0:
		return n
	case p.stale && !p.alone && p.budget < p.most, p.under+n/2 > p.budget: // half of one is let through, as those under way may be longer than this one
		return 0
	}
	return n
}

// ask notes that n bytes are asked for, and returns how many are under way with them.
func (p *pace) ask(n int) (under int) {
	p.alone = p.alone || p.stale && p.under == 0
	p.under += n
	return p.under
}

// drop notes that n bytes that were asked for will not come.
func (p *pace) drop(n int) {
	p.under -= n
	p.alone = false
}

// land notes that n bytes have come that were asked for at the given time, when under
// bytes were under way with them.
func (p *pace) land(n, under int, at, now time.Time) {
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
	case took > target: // else too few bytes were asked for to tell
		p.budget = max(fits, p.budget/2, min(2*paceLeast, p.most))
		p.settled = true
	}
}
