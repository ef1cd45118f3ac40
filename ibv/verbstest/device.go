package verbstest

import (
	"slices"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
)

var deviceTests = []subtest{
	{"Attributes", testAttributes},
	{"Ports", testPorts},
	{"DeviceOfID", testDeviceOfID},
	{"CQDepth", testCQDepth},
	{"Registration", testRegistration},
	{"QPLimits", testQPLimits},
	{"QPGranted", testQPGranted},
	{"CloseOrder", testCloseOrder},
}

// device returns the device that the active side uses to reach env.Addr.
func (env Env) device(t testing.TB) ibv.Device {
	t.Helper()
	return env.unconnected(t).Dev
}

func testAttributes(t *testing.T, env Env) {
	for _, p := range []ibv.Provider{env.Passive, env.Active} {
		if p.Name() == "" {
			t.Error("the provider has no name")
		}
		attr := p.Attr()
		devs, err := p.Devices()
		must(t, "Devices", err)
		if len(devs) == 0 {
			t.Fatal("no devices")
		}
		if attr != p.Attr() {
			t.Error("the attributes of the provider change from call to call")
		}
		names := make(map[string]bool)
		for _, d := range devs {
			if attr.TCPSockets && !d.Attr().Caps.Has(ibv.CapTCPPorts) {
				t.Errorf("%s: connections are TCP's, ports are not", d.Name())
			}
			if attr.UDPSockets && d.Attr().Caps.Has(ibv.CapUD) {
				t.Errorf("%s: datagrams are both UDP's and those of queue pairs", d.Name())
			}
			if d.Name() == "" || names[d.Name()] {
				t.Errorf("device name %q is empty or not unique", d.Name())
			}
			names[d.Name()] = true
			a := d.Attr()
			if a != d.Attr() {
				t.Errorf("%s: the attributes change from call to call", d.Name())
			}
			// What reliable connections cannot do without.
			for what, n := range map[string]int{
				"Ports": a.Ports, "MaxQP": a.MaxQP, "MaxQPWR": a.MaxQPWR, "MaxSGE": a.MaxSGE, "MaxSGERead": a.MaxSGERead,
				"MaxCQ": a.MaxCQ, "MaxCQE": a.MaxCQE, "MaxMR": a.MaxMR, "MaxPD": a.MaxPD, "MaxQPRdAtom": a.MaxQPRdAtom,
				"MaxQPInitRdAtom": a.MaxQPInitRdAtom, "MaxPrivateData": a.MaxPrivateData,
			} {
				if n < 1 {
					t.Errorf("%s: %s is %d", d.Name(), what, n)
				}
			}
			if a.MaxMRSize < 1<<20 || a.MaxMessageSize < 1<<20 {
				t.Errorf("%s: MaxMRSize %d, MaxMessageSize %d", d.Name(), a.MaxMRSize, a.MaxMessageSize)
			}
			if a.MaxInline < 0 {
				t.Errorf("%s: MaxInline is %d", d.Name(), a.MaxInline)
			}
			if a.Transport == ibv.TransportUnknown {
				t.Errorf("%s: unknown transport", d.Name())
			}
		}
	}
}

func testPorts(t *testing.T, env Env) {
	devs, err := env.Passive.Devices()
	must(t, "Devices", err)
	for _, d := range devs {
		ports := d.Attr().Ports
		for n := 1; n <= ports; n++ {
			p, err := d.Port(n)
			must(t, "Port", err)
			if p.State == ibv.PortActive && p.ActiveMTU < 256 {
				t.Errorf("%s port %d: MTU %d", d.Name(), n, p.ActiveMTU)
			}
			if slices.Contains(p.GIDs, ibv.GID{}) {
				t.Errorf("%s port %d: an empty GID in %v", d.Name(), n, p.GIDs)
			}
		}
		for _, n := range []int{-1, 0, ports + 1} {
			if _, err := d.Port(n); err == nil {
				t.Errorf("%s: port %d of %d was found", d.Name(), n, ports)
			}
		}
	}
}

func testDeviceOfID(t *testing.T, env Env) {
	p := NewPair(t, env, PairConfig{})
	for e, prov := range map[*End]ibv.Provider{p.Active: env.Active, p.Passive: env.Passive} {
		devs, err := prov.Devices()
		must(t, "Devices", err)
		if !slices.ContainsFunc(devs, func(d ibv.Device) bool { return d.Name() == e.Dev.Name() }) {
			t.Errorf("device %q of the connection is not among the provider's", e.Dev.Name())
		}
		port, err := e.Dev.Port(e.ID.Port())
		must(t, "Port", err)
		if port.State != ibv.PortActive {
			t.Errorf("the connection's port is %v", port.State)
		}
	}
}

func testCQDepth(t *testing.T, env Env) {
	dev := env.device(t)
	attr := dev.Attr()
	for _, depth := range []int{1, 2, 100, min(1000, attr.MaxCQE)} {
		cq, err := dev.CreateCQ(depth)
		must(t, "CreateCQ", err)
		if cq.Depth() < depth {
			t.Errorf("asked for a depth of %d, got %d", depth, cq.Depth())
		}
		noCompletion(t, cq)
		must(t, "CQ.Close", cq.Close())
	}
	_, err := dev.CreateCQ(attr.MaxCQE + 1)
	mustBe(t, "CreateCQ beyond MaxCQE", err, ibv.ErrLimit)
}

func testRegistration(t *testing.T, env Env) {
	dev := env.device(t)
	pd, err := dev.AllocPD()
	must(t, "AllocPD", err)
	buf := make([]byte, 10000)

	// Nothing about a region needs pages: any bytes can be registered, and more
	// than once.
	keys := make(map[uint32]bool)
	var mrs []ibv.MR
	for _, piece := range [][]byte{buf, buf, buf[1:2], buf[4095:4098], buf[:4096]} {
		for _, access := range []ibv.Access{0, localWrite, allRights, ibv.AccessRemoteRead} {
			mr, err := pd.RegMR(piece, access)
			must(t, "RegMR", err)
			mrs = append(mrs, mr)
			if mr.Len() != len(piece) {
				t.Errorf("Len is %d, want %d", mr.Len(), len(piece))
			}
			if keys[mr.RKey()] {
				t.Errorf("key %#x opens two regions", mr.RKey())
			}
			keys[mr.RKey()] = true
		}
	}
	for name, bad := range map[string]struct {
		buf    []byte
		access ibv.Access
	}{
		"nil":                        {nil, localWrite},
		"empty":                      {buf[:0], localWrite},
		"remote without local write": {buf, ibv.AccessRemoteWrite},
	} {
		if mr, err := pd.RegMR(bad.buf, bad.access); err == nil {
			t.Errorf("RegMR took %s", name)
			mrs = append(mrs, mr)
		}
	}
	for _, mr := range mrs {
		must(t, "MR.Close", mr.Close())
	}
	must(t, "PD.Close", pd.Close())
}

func testQPLimits(t *testing.T, env Env) {
	e := env.unconnected(t)
	attr := e.Dev.Attr()
	fine := ibv.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1}
	for name, change := range map[string]func(*ibv.QPCap){
		"MaxSendWR":  func(c *ibv.QPCap) { c.MaxSendWR = attr.MaxQPWR + 1 },
		"MaxRecvWR":  func(c *ibv.QPCap) { c.MaxRecvWR = attr.MaxQPWR + 1 },
		"MaxSendSGE": func(c *ibv.QPCap) { c.MaxSendSGE = attr.MaxSGE + 1 },
		"MaxRecvSGE": func(c *ibv.QPCap) { c.MaxRecvSGE = attr.MaxSGE + 1 },
		"MaxInline":  func(c *ibv.QPCap) { c.MaxInline = attr.MaxInline + 1 },
	} {
		over := fine
		change(&over)
		_, err := e.ID.CreateQP(e.PD, ibv.QPInit{SendCQ: e.SendCQ, RecvCQ: e.RecvCQ, Cap: over})
		mustBe(t, "CreateQP beyond "+name, err, ibv.ErrLimit)
	}
	// What failed left nothing behind: the ID still takes a queue pair.
	qp, err := e.ID.CreateQP(e.PD, ibv.QPInit{SendCQ: e.SendCQ, RecvCQ: e.RecvCQ, Cap: fine})
	must(t, "CreateQP", err)
	must(t, "QP.Close", qp.Close())
}

func testQPGranted(t *testing.T, env Env) {
	numbers := make(map[uint32]bool)
	for i := range 8 {
		e := env.unconnected(t)
		attr := e.Dev.Attr()
		cfg := PairConfig{SendWR: 1 + 5*i, RecvWR: 1 + 7*i, SGE: min(1+i, attr.MaxSGE), Inline: min(10*i, attr.MaxInline)}
		must(t, "CreateQP", e.createQP(cfg.filled()))
		c := e.QP.Cap()
		if c.MaxSendWR < cfg.SendWR || c.MaxRecvWR < cfg.RecvWR || c.MaxSendSGE < cfg.SGE || c.MaxRecvSGE < cfg.SGE ||
			c.MaxInline < cfg.Inline {
			t.Errorf("granted %+v, asked for %+v", c, cfg)
		}
		if numbers[e.QP.QPN()] {
			t.Errorf("QP number %d was given twice", e.QP.QPN())
		}
		numbers[e.QP.QPN()] = true
		if s := e.QP.State(); s != ibv.QPSInit {
			t.Errorf("a new queue pair is in %v", s)
		}
		n, err := e.QP.PostSend([]ibv.SendWR{{Op: ibv.OpSend}})
		refused(t, "PostSend before the connection", n, err)
		mustBe(t, "PostSend before the connection", err, ibv.ErrState)
		e.Recv(t, ibv.RecvWR{ID: 1})
		noCompletion(t, e.RecvCQ)
	}
}

// testCloseOrder releases parents before their children.
func testCloseOrder(t *testing.T, env Env) {
	e := env.unconnected(t)
	must(t, "CreateQP", e.createQP(PairConfig{}.filled()))
	busy := func(what string, err error) {
		t.Helper()
		mustBe(t, "closing "+what, err, ibv.ErrBusy)
	}
	busy("a PD with a QP", e.PD.Close())
	busy("the CQ of a send queue", e.SendCQ.Close())
	busy("the CQ of a receive queue", e.RecvCQ.Close())
	busy("the ID of a QP", e.ID.Close())
	mem := e.Register(t, make([]byte, 64), localWrite)
	e.Recv(t, ibv.RecvWR{ID: 1, SGL: mem.SGL(0, 64, 1)})
	e.CloseQP(t)
	busy("a PD with an MR", e.PD.Close())
	mem.Close(t)
	must(t, "close", e.close())
}
