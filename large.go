package rdmanet

import "github.com/rdmanet/rdmanet/internal/ring"

// This file makes segments longer while a connection moves bulk data.
//
// On devices that pin memory receives are short, so that an idle connection takes little.
// A message costs its sender, its receiver and the device about the same whatever its length.
// So while data comes that fills one segment after the other, receives of largeSegment bytes
// are posted in place of those of the agreed size. The grant says which size they have.
//
// Messages use up receives in the order in which these were posted, and receives are granted
// in that order. So both ends know the size of the next one. Where no memory can be had for
// large receives or for large sends, normal ones take their place.

const (
	// largeAfter is how many more long segments than short ones must have come for receives
	// to become large, and how many more short ones than long ones for them to become normal
	// again.
	largeAfter = 32

	// maxRuns is how many runs of receives of one size a peer may grant. A peer that keeps to
	// the protocol grants no more runs than it has receives.
	maxRuns = 1 << 10
)

// receiveSizes is the sizes of receives that were posted, or granted, one after the other. As
// long as all of them are normal it is empty.
type receiveSizes struct{ runs ring.Ring[receiveRun] }

// receiveRun is receives of one size that follow each other.
type receiveRun struct {
	n     int
	large bool
}

// add appends n receives to those that there are, total in number.
func (r *receiveSizes) add(total, n int, large bool) {
	switch last := r.runs.Len() - 1; {
	case n == 0, last < 0 && !large:
	case last >= 0 && r.runs.At(last).large == large:
		r.runs.At(last).n += n
	default:
		if last < 0 && total > 0 {
			r.runs.Push(receiveRun{n: total})
		}
		r.runs.Push(receiveRun{n, large})
	}
}

// next returns how many of the receives, total in number, have the size of the first, and
// which size that is.
func (r *receiveSizes) next(total int) (n int, large bool) {
	if r.runs.Len() == 0 {
		return total, false
	}
	return r.runs.At(0).n, r.runs.At(0).large
}

// take removes the first n receives, no more than next has returned.
func (r *receiveSizes) take(n int) {
	if r.runs.Len() == 0 {
		return
	}
	if first := r.runs.At(0); first.n > n {
		first.n -= n
		return
	}
	r.runs.Drop()
	if r.runs.Len() == 1 && !r.runs.At(0).large {
		r.runs.Drop()
	}
}

// untilNormal returns how many receives must be used up until only normal ones are left.
func (r *receiveSizes) untilNormal() (n int) {
	for i, sum := 0, 0; i < r.runs.Len(); i++ {
		sum += r.runs.At(i).n
		if r.runs.At(i).large {
			n = sum
		}
	}
	return n
}

// largeReceives decides when receives are large. It is a part of credits.
type largeReceives struct {
	known  bool // known is set if both ends know large receives.
	agreed bool // agreed is set if besides they are larger than normal ones of this side, and enough are possible.
	on     bool // on is set while large receives are posted.
	score  int  // score is how many more long segments than short ones came lately, at most largeAfter.
	kept   int  // kept is how many receives that are posted or unread are large.
	weight int  // weight is how many normal receives take as much memory as a large one, rounded up.
	most   int  // most is how many receives may be posted or unread while on is set.
}
