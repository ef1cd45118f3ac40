package rdmanet

import (
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// A probe target is found behind the early negotiation message, or where that is missing
// behind the fixed part.
func TestParseProbeTarget(t *testing.T) {
	base := smbdpeer.PrivateData{Rdmanet: true, Features: smbdpeer.FeatureFIN | smbdpeer.FeatureNoEmptyRead | smbdpeer.FeatureProbeTarget, MaxReceiveSize: 8136}
	early := base
	early.Features |= smbdpeer.FeatureEarly
	said := smbdpeer.ProbeTarget{Addr: 0x0102030405060708, Key: 0x090a0b0c}
	want := &probeTarget{addr: 0x0102030405060708, key: 0x090a0b0c}
	request := append(goodRequest.Append(nil), wireGrant(8)...)
	for _, tt := range []struct {
		name  string
		b     []byte
		early int
		ok    bool
	}{
		{"request", said.Append(base.Append(nil)), smbdpeer.EarlyRequestLen, true},
		{"response", said.Append(base.Append(nil)), smbdpeer.EarlyResponseLen, true},
		{"early request", said.Append(append(early.Append(nil), request...)), smbdpeer.EarlyRequestLen, true},
		{"early response", said.Append(append(early.Append(nil), goodResponse.Append(nil)...)), smbdpeer.EarlyResponseLen, true},
		{"padded", append(said.Append(base.Append(nil)), make([]byte, 99)...), smbdpeer.EarlyRequestLen, true},
		{"not said", said.Append(smbdpeer.PrivateData{Rdmanet: true, Features: smbdpeer.FeatureNoEmptyRead}.Append(nil)), smbdpeer.EarlyRequestLen, false},
		{"cut short", said.Append(base.Append(nil))[:smbdpeer.PrivateLen+smbdpeer.ProbeTargetLen-1], smbdpeer.EarlyRequestLen, false},
		{"early and cut short", said.Append(append(early.Append(nil), request...))[:smbdpeer.EarlyRequestLen+smbdpeer.ProbeTargetLen-1], smbdpeer.EarlyRequestLen, false},
		{"plain peer", append(make([]byte, smbdpeer.PrivateLen), said.Append(nil)...), smbdpeer.EarlyRequestLen, false},
		{"nothing", nil, smbdpeer.EarlyRequestLen, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := parseProbeTarget(tt.b, tt.early); tt.ok {
				require.Equal(t, want, got)
			} else {
				require.Nil(t, got)
			}
		})
	}
}

// probeTargetPrivate is the private data of a peer with this probe target.
func probeTargetPrivate(p smbdpeer.ProbeTarget) []byte {
	return p.Append(smbdpeer.PrivateData{IRD: 4, ORD: 4, Rdmanet: true,
		Features:       smbdpeer.FeatureFIN | smbdpeer.FeatureTransfer | smbdpeer.FeatureNoEmptyRead | smbdpeer.FeatureProbeTarget,
		MaxReceiveSize: 8136}.Append(nil))
}

// A peer whose probe target is where it says is asked by it, and one with none there loses
// its connection over it, with an error that tells.
func TestProbeTargetAtTheWire(t *testing.T) {
	for _, side := range sides {
		for _, honest := range []bool{true, false} {
			t.Run(side.name+map[bool]string{true: "/honest", false: "/bogus"}[honest], func(t *testing.T) {
				inTime(t, 100*time.Millisecond, func(d time.Duration) bool { return askedByTarget(t, side.active, honest, d) })
			})
		}
	}
}

// askedByTarget has a connection without credits ask its peer, or rather the peer's device. It
// reports whether KeepAlive was long enough for that.
func askedByTarget(t *testing.T, active, honest bool, keepAlive time.Duration) bool {
	t.Helper()
	m := newModest(t, 1<<20, 1<<14, false)
	s := newSceneOn(t, m)
	s.cfg.KeepAlive, s.cfg.LingerTimeout, s.cfg.TransferSize = keepAlive, -1, -1
	var c *Conn
	var p *smbdpeer.Raw
	memory := []byte{0}
	where := func(p *smbdpeer.Raw) smbdpeer.ProbeTarget {
		addr, key := p.Register(memory)
		if !honest {
			addr += 1 << 30
		}
		return smbdpeer.ProbeTarget{Addr: addr, Key: key}
	}
	if active {
		ln := listenRaw(t)
		result := s.dial(ln)
		p = acceptRaw(t, ln)
		private := probeTargetPrivate(where(p))
		require.NoError(t, p.ID.Accept(tctx, rawParam(p.ID, private)))
		p.Respond(goodResponse)
		r := <-result
		require.NoError(t, r.err)
		c = s.owned(r.c)
	} else {
		ln := s.listen()
		p = dialRawOn(t, s.peers, ln.Addr(), func(p *smbdpeer.Raw) []byte { return probeTargetPrivate(where(p)) })
		p.Negotiate(goodRequest)
		conn, err := ln.Accept()
		require.NoError(t, err)
		c = s.owned(conn)
	}
	wrote := writing(c, make([]byte, 64<<10))
	require.True(t, eventually(func() bool { return c.Stats().CreditStalls > 0 || len(wrote) > 0 }))
	p.RequestResponse(0) // the answer takes the last credit, which goes with a grant alone
	if honest {
		// A Read that was not answered would end the connection before the next one.
		require.True(t, eventually(func() bool { return m.reads.Load() >= 3 || len(wrote) > 0 }))
		if len(wrote) == 0 {
			require.Zero(t, m.empty.Load())
			require.NoError(t, c.Close())
			<-wrote
			return true
		}
		require.ErrorIs(t, (<-wrote).err, errSilent)
		return false
	}
	_, err := c.Read(make([]byte, 1))
	require.Error(t, err)
	if errors.Is(err, errSilent) {
		return false
	}
	require.NotErrorIs(t, err, io.EOF)
	s.ended(err)
	return true
}

// A peer that is not rdmanet is asked by RDMA Reads of no bytes only where every device
// answers them rightly.
func TestPlainPeerProbe(t *testing.T) {
	for _, side := range sides {
		for _, all := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%v", side.name, all), func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T) {
					f := newMemoryFabric()
					dev := newModestOn(f, 1<<20, 1<<14, false)
					dev.others = &all
					s := newSceneOn(t, dev)
					s.peers = f
					c, _, l, wrote := s.unable(side.active, []byte{0, 0, 0, 1, 0, 0, 0, 1})
					require.Zero(t, c.Info().Extensions)
					due := l.lastHeard().Add(time.Hour)
					sleepUntil(due)
					require.Equal(t, []probe{{map[bool]string{true: "Read", false: "Write"}[all], due}}, l.take())
					require.NoError(t, c.Close())
					require.Error(t, (<-wrote).err)
				})
			})
		}
	}
}

// The probe target is all that a peer can read, and it can as long as the connection lives.
func TestProbeTargetOpensOneByte(t *testing.T) {
	for _, beyond := range []int{0, 1} {
		t.Run(fmt.Sprint(beyond), func(t *testing.T) {
			m := newModest(t, 1<<20, 1<<14, false)
			m.garble = true
			s := newSceneOn(t, m)
			s.cfg.LingerTimeout, s.cfg.TransferSize = -1, -1
			ln := s.listen()
			p := dialRaw(t, ln.Addr(), transferPrivate(true))
			theirs, ok := smbdpeer.ParseProbeTarget(p.ID.PrivateData(), smbdpeer.EarlyResponseLen)
			require.True(t, ok)
			p.Negotiate(goodRequest)
			c, err := ln.Accept()
			require.NoError(t, err)
			s.owned(c)
			got := []byte{255}
			if beyond > 0 {
				status := p.RDMA(ibv.OpRead, got, theirs.Addr+1, theirs.Key)
				require.NotEqual(t, ibv.WCSuccess, status)
				return
			}
			for range 3 {
				require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpRead, got, theirs.Addr, theirs.Key))
				require.Zero(t, got[0])
			}
		})
	}
}

// A parser of anything finds a probe target where one was put.
func FuzzProbeTarget(f *testing.F) {
	f.Add(probeTargetPrivate(smbdpeer.ProbeTarget{Addr: 1, Key: 2}), true)
	f.Add(earlyPrivate(goodResponse.Append(nil)), false)
	f.Fuzz(func(t *testing.T, b []byte, request bool) {
		early := smbdpeer.EarlyResponseLen
		if request {
			early = smbdpeer.EarlyRequestLen
		}
		p := parseProbeTarget(b, early)
		if p == nil {
			return
		}
		want, ok := smbdpeer.ParseProbeTarget(b, early)
		require.True(t, ok)
		require.Equal(t, want, smbdpeer.ProbeTarget{Addr: p.addr, Key: p.key})
		require.Equal(t, want.Append(nil), p.append(nil))
	})
}
