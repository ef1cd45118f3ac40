package rdmanet

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// silentTries is the least number of tries of BenchmarkSilentPeers.
const silentTries = 5

// silentBounds has the longest time that each call may take, as a median.
var silentBounds = map[string]time.Duration{
	"Shutdown":             50 * time.Millisecond,
	"Shutdown-active":      1100 * time.Millisecond, // its context ends after a second
	"Server.Close":         50 * time.Millisecond,
	"Server.Close-active":  50 * time.Millisecond,
	"Listener.Close":       50 * time.Millisecond,
	"CloseIdleConnections": 50 * time.Millisecond,
}

// silentRequest is the most time by which a request may exceed the same one over TCP.
const silentRequest = 10 * time.Millisecond

// BenchmarkSilentPeers measures what four silent peers cost a program that uses net/http,
// over TCP and over the software device. All connections go through a proxy, so those of the
// software device have its TCP link. It reports the median and the maximum of at least
// five tries, in milliseconds:
//
//	CloseIdleConnections, Server.Close, Listener.Close   the time of the call
//	Shutdown                                             with four idle connections
//	Shutdown-active                                      with two requests in progress, for which it waits a second
//	Server.Close-active                                  of these two, one of which has more to send than the link takes
//	request                                              the slowest one to a server that answers, while a
//	                                                     Transport closes its connections to the silent one
//
// The benchmark fails when a median exceeds its bound in silentBounds, or when that of
// request exceeds the median of TCP in the same run by more than silentRequest. Where the
// tests run over RDMA devices (onRDMA) it reports and does not fail: guests are emulated,
// and ten times slower.
func BenchmarkSilentPeers(b *testing.B) {
	var overTCP time.Duration
	for _, n := range plainNets(0) {
		b.Run(n.name, func(b *testing.B) {
			took := make(map[string][]time.Duration)
			tries := 0
			for b.Loop() {
				trySilentPeers(b, n, took)
				tries++
			}
			for ; tries < silentTries; tries++ {
				trySilentPeers(b, n, took)
			}
			b.ReportMetric(0, "ns/op") // not shown: the time of a whole try means nothing
			for what, all := range took {
				slices.Sort(all)
				median := all[len(all)/2]
				b.ReportMetric(inMilliseconds(median), what+"-ms")
				b.ReportMetric(inMilliseconds(all[len(all)-1]), what+"-max-ms")
				bound, bounded := silentBounds[what]
				if what == "request" {
					if n.name == "tcp" {
						overTCP = median
					}
					bound, bounded = overTCP+silentRequest, overTCP > 0
				}
				if bounded && median > bound && !onRDMA {
					b.Errorf("%s takes %.1f ms, the median of %d tries; the bound is %.1f ms", what, inMilliseconds(median), len(all), inMilliseconds(bound))
				}
			}
		})
	}
}

func inMilliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// trySilentPeers adds the times of one try to took.
func trySilentPeers(b *testing.B, n plainNet, took map[string][]time.Duration) {
	note := func(what string, f func()) {
		start := time.Now()
		f()
		took[what] = append(took[what], time.Since(start))
	}
	shutdown := func(s *silentServer, want error) {
		ctx, cancel := context.WithTimeout(tctx, time.Second)
		defer cancel()
		require.ErrorIs(b, s.Shutdown(ctx), want)
	}

	c := newSilentClient(b, n)
	s := serveSilent(b, n)
	require.NoError(b, c.get(s, silentPeers))
	s.silence(b, silentPeers, 0)
	note("CloseIdleConnections", c.tr.CloseIdleConnections)
	note("Server.Close", func() { s.Close() })

	s = serveSilent(b, n)
	s.request(b, idleRequest, idleRequest, idleRequest, idleRequest)
	s.silence(b, silentPeers, 0)
	note("Shutdown", func() { shutdown(s, nil) })
	s.closeClients(b)

	s = serveSilent(b, n)
	s.request(b, idleRequest, uploadRequest, idleRequest, endlessRequest)
	s.silence(b, 2, 2)
	note("Shutdown-active", func() { shutdown(s, context.DeadlineExceeded) })
	note("Server.Close-active", func() { s.Close() })
	s.closeClients(b)

	s, ln := listenSilent(b, n)
	s.request(b, make([]string, silentPeers)...)
	s.awaitReady(b, ln)
	s.link.freeze(toListener, fromListener)
	note("Listener.Close", func() { ln.Close() })
	s.closeClients(b)

	took["request"] = append(took["request"], slowestRequest(b, n))
}

// slowestRequest returns the time of the slowest request to a server that answers, while the
// idle timeout of the Transport closes its connections to a silent one.
func slowestRequest(b *testing.B, n plainNet) (slowest time.Duration) {
	c := newSilentClient(b, n)
	silent, well := serveSilent(b, n), serveSilent(b, n)
	c.tr.IdleConnTimeout = 100 * time.Millisecond
	answers, err := c.begin(silent, silentPeers)
	require.NoError(b, err)
	silent.silence(b, silentPeers, 0)
	require.NoError(b, c.finish(answers))
	for pause := time.NewTicker(time.Millisecond); c.closed() < silentPeers; <-pause.C {
		start := time.Now()
		err := c.get(well, 1)
		slowest = max(slowest, time.Since(start))
		require.NoError(b, err)
	}
	c.tr.CloseIdleConnections()
	silent.Close()
	well.Close()
	return slowest
}
