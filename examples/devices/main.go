// Command devices examines RDMA on this machine. It lists the devices that rdmanet can use.
// If there are none, it says what is missing. For each address that it is given it says
// which device would serve it, and why.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"reflect"
	"runtime"
	"strings"
	"time"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
)

func main() {
	timeout := flag.Duration("timeout", 5*time.Second, "for each address and device")
	dial := flag.Bool("dial", false, "connect to the addresses, too: a server must listen there")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: devices [flags] [host:port ...]")
		flag.PrintDefaults()
	}
	flag.Parse()
	d := doctor{out: os.Stdout, timeout: *timeout, dial: *dial}
	d.devices()
	ok := true
	for _, address := range flag.Args() {
		ok = d.address(address) && ok
	}
	if !ok {
		os.Exit(1)
	}
}

// deviceEnv is the environment variable whose value is used in place of Config.Device.
const deviceEnv = "RDMANET_DEVICE"

type doctor struct {
	out     io.Writer
	timeout time.Duration
	dial    bool
}

func (d *doctor) printf(format string, args ...any) { fmt.Fprintf(d.out, format+"\n", args...) }

// devices lists all devices, RDMA devices first.
func (d *doctor) devices() {
	d.printf("Limit of locked memory: %s", memlock())
	if env := os.Getenv(deviceEnv); env != "" {
		d.printf("%s=%s decides for every program", deviceEnv, env)
	}
	p, err := rdmacore.New(rdmacore.Config{})
	if err == nil {
		err = d.list(p)
	}
	if err == nil {
		if err := p.Unusable(); err != nil {
			d.printf("\nCannot be used: %v", err)
		}
	}
	if err != nil {
		d.printf("\nNo RDMA device: %v", err)
		if runtime.GOOS == "linux" && !rdmacore.Present() {
			d.printf("  The kernel has none (/sys/class/infiniband is empty). For a software one: modprobe rdma_rxe && " +
				"rdma link add rxe0 type rxe netdev INTERFACE")
		}
	}
	if err := d.list(iwarp.New(iwarp.Config{})); err != nil {
		d.printf("\niwarp: %v", err)
	}
}

func (d *doctor) list(p ibv.Provider) error {
	devs, err := p.Devices()
	if err != nil {
		return err
	}
	for _, dev := range devs {
		d.device(p, dev)
	}
	return nil
}

func (d *doctor) device(p ibv.Provider, dev ibv.Device) {
	a := dev.Attr()
	d.printf("\n%s (provider %s): %v", dev.Name(), p.Name(), a.Transport)
	if a.FWVersion != "" {
		d.printf("  firmware      %s", a.FWVersion)
	}
	if a.NodeGUID != 0 {
		d.printf("  node GUID     %016x", a.NodeGUID)
	}
	d.printf("  queue pairs   %d, of %d work requests with %d elements, %d bytes inline", a.MaxQP, a.MaxQPWR, a.MaxSGE, a.MaxInline)
	d.printf("  completions   %d queues of %d", a.MaxCQ, a.MaxCQE)
	pinned := "is locked"
	if a.Caps.Has(ibv.CapOnDemandPaging) {
		pinned = "stays in ordinary memory"
	}
	d.printf("  memory        %d regions of up to %s; what is registered %s", a.MaxMR, bytes(a.MaxMRSize), pinned)
	d.printf("  RDMA Reads    %d served, %d outstanding a queue pair", a.MaxQPRdAtom, a.MaxQPInitRdAtom)
	d.printf("  private data  %d bytes", a.MaxPrivateData)
	d.printf("  operations    %s", operations(a.Caps))
	if q := quirks(a.Quirks); q != "" {
		d.printf("  quirks        %s", q)
	}
	for n := 1; n <= a.Ports; n++ {
		port, err := dev.Port(n)
		if err != nil {
			d.printf("  port %d        %v", n, err)
			continue
		}
		d.printf("  port %d        %v, MTU %d%s", n, port.State, port.ActiveMTU, netDev(port.NetDev))
		if port.State != ibv.PortActive {
			d.printf("                bring its network interface up (ip link set ... up), or look at the cable")
		}
		for _, gid := range port.GIDs {
			d.printf("                GID %v", gid)
		}
	}
}

func netDev(name string) string {
	if name == "" {
		return ""
	}
	return ", network interface " + name
}

// bytes formats a size. A size that is no real bound is "any size".
func bytes(n uint64) string {
	switch {
	case n >= 1<<50:
		return "any size"
	case n >= 1<<30:
		return fmt.Sprintf("%d GiB", n>>30)
	}
	return fmt.Sprintf("%d bytes", n)
}

func operations(c ibv.Caps) string {
	s := "send, write, read"
	for _, op := range []struct {
		cap  ibv.Caps
		name string
	}{
		{ibv.CapSendInvalidate, "send with invalidate"},
		{ibv.CapSendImm, "send with immediate"},
		{ibv.CapWriteImm, "write with immediate"},
		{ibv.CapAtomic, "atomics"},
		{ibv.CapUD, "datagrams"},
	} {
		if c.Has(op.cap) {
			s += ", " + op.name
		}
	}
	return s
}

// quirks lists the rules of package ibv that the device breaks.
func quirks(q ibv.Quirks) string {
	var names []string
	v := reflect.ValueOf(q)
	for i := range v.NumField() {
		if v.Field(i).Bool() {
			names = append(names, v.Type().Field(i).Name)
		}
	}
	return strings.Join(names, ", ")
}

// address prints which device would serve an address. It tries the devices as Dial does.
func (d *doctor) address(address string) bool {
	d.printf("\n%s:", address)
	ctx := context.Background()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		d.printf("  %v", err)
		return false
	}
	number, err := net.DefaultResolver.LookupPort(ctx, "tcp", port)
	if err != nil {
		d.printf("  %v", err)
		return false
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		d.printf("  %v", err)
		return false
	}
	served := false
	for _, a := range addrs {
		served = d.route(netip.AddrPortFrom(a.Unmap(), uint16(number))) || served
	}
	if d.dial {
		return d.connect(address)
	}
	return served
}

// route reports whether a device would serve one address. If RDMANET_DEVICE is set, only
// the device that it names can.
func (d *doctor) route(remote netip.AddrPort) bool {
	ctx, cancel := context.WithTimeout(context.Background(), d.timeout)
	defer cancel()
	want := os.Getenv(deviceEnv)
	if want == iwarp.Name {
		d.printf("  %v: %s, the software device", remote, iwarp.Name)
		d.printf("    because %s says so", deviceEnv)
		return true
	}
	cfg := rdmacore.Config{Device: want}
	if want == rdmacore.Name {
		cfg.Device = "" // The empty name means any device.
	}
	why := "this process cannot use RDMA devices"
	p, err := rdmacore.New(cfg)
	if err == nil {
		why = "no RDMA device leads there"
		var id ibv.ID
		if id, err = p.Resolve(ctx, netip.AddrPort{}, remote); err == nil {
			defer id.Close()
			d.printf("  %v: %s, port %d, from %v", remote, id.Device().Name(), id.Port(), id.LocalAddr().Addr())
			if want == "" {
				d.printf("    if nobody listens there over RDMA, %s on the same port", iwarp.Name)
			}
			return true
		}
	}
	if want != "" {
		d.printf("  %v: none", remote)
		d.printf("    because %s=%s forbids the software device, and %s: %v", deviceEnv, want, why, err)
		return false
	}
	d.printf("  %v: %s, the software device", remote, iwarp.Name)
	d.printf("    because %s: %v", why, err)
	return true
}

// connect dials the address.
func (d *doctor) connect(address string) bool {
	start := time.Now()
	conn, err := rdmanet.DialTimeout("rdma", address, d.timeout)
	if err != nil {
		d.printf("  dial: %v", err)
		return false
	}
	defer conn.Close()
	d.printf("  dial: connected in %v: %+v", time.Since(start).Round(time.Microsecond), conn.(*rdmanet.Conn).Info())
	return true
}
