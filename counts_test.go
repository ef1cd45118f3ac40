package rdmanet

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// countedDevices are the devices on which the verbs of a request are counted.
func countedDevices(t *testing.T) map[string]ibv.Provider {
	all := map[string]ibv.Provider{"memory": newMemoryFabric()}
	if onRDMA {
		all["device"] = newProvider(t)
		return all
	}
	all["software, TCP"] = overTCP()
	all["software, shared memory"] = iwarp.New(iwarp.Config{SameHost: iwarp.SameHostOn}) // where there is any
	return all
}

// mostOfRequest returns what a request and its answer may take of both ends, with a tenth
// for grants, and for the completions that stand for many sends. The polls are one behind
// each arm, as something may have arrived before it, and one behind each wait.
func mostOfRequest(c *Conn) map[string]float64 {
	most := map[string]float64{"sends": 2, "posts of sends": 2, "receives": 2, "posts of receives": 2, "completions": 2, "arms": 2, "waits": 2, "polls": 4}
	if attr := c.lane.id.Device().Attr(); !attr.Caps.Has(ibv.CapWaitReceives) {
		delete(most, "polls") // Waits for answers poll as long as that pays.
	}
	if c.lane.signalEach && c.lane.inline < dataOffset+requestSize {
		most["completions"] = 4 // Nothing else tells when the buffers of sends are free.
	}
	return most
}

const requestSize = 64

// What a request of 64 bytes and its answer take of both ends: two sends, two receives, and
// little else. Grants travel with the answers. Sends complete by the dozen.
func TestCountsOfRequest(t *testing.T) {
	const n = 400
	for name, p := range countedDevices(t) {
		for pace, pause := range map[string]time.Duration{"busy": 0, "paced": 5 * time.Millisecond} {
			t.Run(name+"/"+pace, func(t *testing.T) {
				checkLeaks(t)
				s := verbstest.NewSwitch(p)
				cfg := Config{Provider: s}
				a, b := pipe(t, "rdma4", loopbacks[0].address, &ListenConfig{Config: cfg}, &Dialer{Config: cfg})
				defer a.Close()
				defer b.Close()
				echoed := make(chan error, 1)
				go func() {
					buf := make([]byte, requestSize)
					for {
						if _, err := io.ReadFull(b, buf); err != nil {
							echoed <- err
							return
						}
						b.Write(buf)
					}
				}()
				buf := make([]byte, requestSize)
				ask := func(n int) {
					for range n {
						a.Write(buf)
						_, err := io.ReadFull(a, buf)
						require.NoError(t, err)
						time.Sleep(pause)
					}
				}
				rounds := n
				if pause > 0 {
					rounds = n / 8
				}
				ask(30)
				before := s.Counts()
				ask(rounds)
				c := s.Counts().Sub(before)
				counts := map[string]float64{
					"sends": float64(c.SendWRs), "posts of sends": float64(c.SendPosts), "receives": float64(c.RecvWRs), "posts of receives": float64(c.RecvPosts),
					"completions": float64(c.Completions), "arms": float64(c.Arms), "waits": float64(c.Waits), "polls": float64(c.Polls),
				}
				for what, n := range counts {
					counts[what] = n / float64(rounds)
				}
				t.Logf("of a request and its answer: %v", counts)
				for what, most := range mostOfRequest(a) {
					require.LessOrEqual(t, counts[what], 1.1*most, what)
				}
				require.NoError(t, a.Close())
				require.Equal(t, io.EOF, <-echoed)
			})
		}
	}
}
