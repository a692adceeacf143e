import sys, time, torch, shardwise as sw, traceback
from torch import nn
import torch.nn.functional as F
L=70
class M(nn.Module):
    def __init__(self, f, **mods):
        super().__init__(); self.fn=f
        for k,v in mods.items(): setattr(self,k,v)
    def forward(self, **b): return self.fn(self, **b)
C={}
def case(f): C[f.__name__]=f; return f
X=lambda *s: torch.randn(*s)
@case
def rnn_cell():
    def f(m,x):
        h=torch.zeros(x.shape[0],9)
        for t in range(L): h=m.c(x[:,t],h)
        return h.square().mean()
    return M(f,c=nn.RNNCell(7,9)),{'x':X(6,L,7)}
@case
def lstm_cell_unbind():
    def f(m,x):
        s=(torch.zeros(x.shape[0],9),torch.zeros(x.shape[0],9)); ys=[]
        for u in x.unbind(1): s=m.c(u,s); ys.append(s[0])
        return (torch.stack(ys).square().mean()+s[1].mean())
    return M(f,c=nn.LSTMCell(7,9)),{'x':X(6,L,7)}
@case
def reverse():
    def f(m,x):
        h=torch.zeros(x.shape[0],9); ys=[]
        for t in reversed(range(L)): h=torch.tanh(m.l(x[:,t])+0.9*h); ys.append(h)
        return torch.stack(ys[::-1],1).square().mean()
    return M(f,l=nn.Linear(7,9)),{'x':X(6,L,7)}
@case
def none_first():
    def f(m,x):
        h=None; ys=[]
        for t in range(L):
            y=m.l(x[:,t]); h=torch.tanh(y) if h is None else torch.tanh(y+0.9*h); ys.append(h)
        return torch.stack(ys,1).square().mean()
    return M(f,l=nn.Linear(7,9)),{'x':X(6,L,7)}
@case
def second_order():
    def f(m,x):
        a=b=torch.zeros(x.shape[0],7); ys=[]
        for t in range(L): a,b=torch.tanh(m.l(x[:,t])+0.5*a-0.3*b),a; ys.append(a)
        return torch.stack(ys,1).square().mean()
    return M(f,l=nn.Linear(7,7)),{'x':X(6,L,7)}
@case
def inplace_out():
    def f(m,x):
        out=torch.zeros(x.shape[0],L,7); h=torch.zeros(x.shape[0],7)
        for t in range(L): h=torch.tanh(m.l(x[:,t])+0.5*h); out[:,t]=h
        return out.square().mean()
    return M(f,l=nn.Linear(7,7)),{'x':X(6,L,7)}
@case
def cat_slices():
    def f(m,x):
        h=torch.zeros(x.shape[0],1,7); ys=[]
        for t in range(L): h=torch.tanh(m.l(x[:,t:t+1])+0.5*h); ys.append(h)
        return torch.cat(ys,1).square().mean()
    return M(f,l=nn.Linear(7,7)),{'x':X(6,L,7)}
@case
def some_outputs():
    def f(m,x):
        h=torch.zeros(x.shape[0],7); ys=[]
        for t in range(L): h=torch.tanh(m.l(x[:,t])+0.5*h); ys.append(h)
        return ys[3].square().mean()+ys[40].sum()+ys[-1].mean()+torch.stack(ys[::7]).square().mean()
    return M(f,l=nn.Linear(7,7)),{'x':X(6,L,7)}
@case
def loss_accum():
    def f(m,x,y):
        h=torch.zeros(x.shape[0],7); loss=0.
        for t in range(L): h=torch.tanh(m.l(x[:,t])+0.5*h); loss=loss+F.cross_entropy(h,y[:,t])
        return loss/L
    return M(f,l=nn.Linear(7,7)),{'x':X(6,L,7),'y':torch.randint(0,7,(6,L))}
@case
def two_layers():
    def f(m,x):
        for l in m.ls:
            h=torch.zeros(x.shape[0],7); ys=[]
            for t in range(L): h=torch.tanh(l(x[:,t])+0.5*h); ys.append(h)
            x=torch.stack(ys,1)
        return x.square().mean()
    return M(f,ls=nn.ModuleList([nn.Linear(7,7),nn.Linear(7,7)])),{'x':X(6,L,7)}
@case
def interleaved():
    def f(m,x):
        h=torch.zeros(x.shape[0],7); g=torch.zeros(x.shape[0],7)
        for t in range(L):
            h=torch.tanh(m.a(x[:,t])+0.5*g); g=torch.sigmoid(m.b(x[:,L-1-t])+0.5*h)
        return (h*g).mean()
    return M(f,a=nn.Linear(7,7),b=nn.Linear(7,7)),{'x':X(6,L,7)}
@case
def shift_register():
    def f(m,x):
        a=b=c=d=torch.zeros(x.shape[0],7); ys=[]
        for t in range(L): 
            ys.append(d.roll(1,-1)*2); a,b,c,d=m.l(x[:,t]),a,b.roll(1,0),c
        return torch.stack(ys,1).square().mean()
    return M(f,l=nn.Linear(7,7)),{'x':X(6,L,7)}
@case
def scalar_growth():
    def f(m,x):
        h=torch.zeros(x.shape[0],7)
        for t in range(L): h=torch.tanh(m.l(x[:,t])+0.5*h)*t
        return h.mean()
    return M(f,l=nn.Linear(7,7)),{'x':X(6,L,7)}
@case
def float_growth():
    def f(m,x):
        h=torch.zeros(x.shape[0],7)
        for t in range(L): h=torch.tanh(m.l(x[:,t])+0.5*h)*(1+t*0.01)
        return h.mean()
    return M(f,l=nn.Linear(7,7)),{'x':X(6,L,7)}
@case
def view_in_body():
    def f(m,x):
        h=torch.zeros(x.shape[0],8)
        for t in range(L):
            h=torch.tanh(m.l(x[:,t])+0.5*(h.view(x.shape[0],2,4)*2).reshape(x.shape[0],8))
        return h.mean()
    return M(f,l=nn.Linear(7,8)),{'x':X(6,L,7)}
@case
def nested():
    def f(m,x):
        tot=0.
        for i in range(L):
            h=torch.zeros(x.shape[0],3)
            for t in range(L): h=torch.tanh(x[:,t]*m.w.weight[0]+h)
            tot=tot+h*0.1
        return tot.mean()
    return M(f,w=nn.Linear(3,1)),{'x':X(6,L,3)}
@case
def albert():
    def f(m,x):
        for i in range(L): x=x+m.l(torch.relu(m.n(x)))
        return x.square().mean()
    return M(f,l=nn.Linear(7,7),n=nn.LayerNorm(7)),{'x':X(6,7)}
@case
def dropout():
    def f(m,x):
        for i in range(L): x=x+F.dropout(m.l(x),.1)
        return x.square().mean()
    return M(f,l=nn.Linear(7,7)),{'x':X(6,7)}
only=sys.argv[1:]
for n,f in C.items():
    if only and n not in only: continue
    torch.manual_seed(0)
    try:
        m,b=f(); t=time.process_time(); g=sw.capture(m,b); tc=time.process_time()-t
        g.verify()
        out=[]
        for s,r in (('ddp',3),('tensor',2)):
            try:
                c=sw.verify(m,b,getattr(sw.strategies,s)(g,sw.Cluster.local(r))); out.append(f'{s}:{"ok" if c.ok else str(c)[:700]}')
            except Exception as e: out.append(f'{s}:{type(e).__name__} {str(e)[:200]}')
        sc=[x for x in g.nodes if '.scan_' in x.op]
        print(f'{n:18} cpu {tc:.1f} nodes {len(g.nodes)} scans {len(sc)} trips {[g.functions[x.op].trips for x in sc]}', *out, flush=True)
    except Exception as e: print(n,type(e).__name__,str(e)[:400]); traceback.print_exc(limit=-6)
